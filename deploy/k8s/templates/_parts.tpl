{{- define "meshloom.labels" -}}
app.kubernetes.io/name: meshloom
app.kubernetes.io/instance: {{ .release }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- /* All that a pod needs to be an ordinary user with nothing of the host's. */}}
{{- define "meshloom.pod" -}}
# Without this, a Service named meshloom would set MESHLOOM_PORT.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .user }}
  runAsGroup: {{ .user }}
  fsGroup: {{ .user }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .secrets }}
imagePullSecrets:
{{- range . }}
- name: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{- define "meshloom.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "meshloom.secret" -}}
valueFrom:
  secretKeyRef: {name: {{ .secret }}, key: {{ .key }}}
{{- end }}

{{- /* Which node it is, and its user of Redis. */}}
{{- define "meshloom.agent" -}}
- name: MESHLOOM_NODE_ID
  valueFrom:
    fieldRef: {fieldPath: metadata.name}
- {name: MESHLOOM_REDIS_URL, value: redis://agent-$(MESHLOOM_NODE_ID)@{{ .Release.Name }}-redis:6379/0}
# No file: ranks run as the agent's user and could read it. They cannot read its environment.
- name: MESHLOOM_REDIS_PASSWORD
  {{- include "meshloom.secret" (dict "secret" .Values.secret "key" "redis-agent-password") | nindent 2 }}
{{- end }}

{{- define "meshloom.files" -}}
secret:
  secretName: {{ .secret }}
  defaultMode: 0440
  items:
  {{- range .keys }}
  - {key: {{ . }}, path: {{ . }}}
  {{- end }}
{{- end }}

{{- /* The nodes that may join, each of which has a user of Redis. */}}
{{- define "meshloom.nodes" -}}
{{- $nodes := list }}
{{- range $number := until (int .Values.agents.replicas) }}
{{- $nodes = append $nodes (printf "%s-agents-%d" $.Release.Name $number) }}
{{- end }}
{{- range $pool := .Values.pools.pools }}
{{- range $number := until (int $pool.max_nodes) }}
{{- $nodes = append $nodes (printf "%s-%d" $pool.name (add1 $number)) }}
{{- end }}
{{- end }}
{{- toJson $nodes }}
{{- end }}

{{- /* Namespaces in which the controller makes Jobs with its own service account. */}}
{{- define "meshloom.namespaces" -}}
{{- $namespaces := list }}
{{- range $pool := .Values.pools.pools }}
{{- if and (eq $pool.kind "kubernetes") (not $pool.kubeconfig) }}
{{- $namespaces = append $namespaces $pool.namespace }}
{{- end }}
{{- end }}
{{- uniq $namespaces | toJson }}
{{- end }}
