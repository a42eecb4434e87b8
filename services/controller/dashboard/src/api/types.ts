// The shapes of REST v1 as `services/contract/api/views.py` gives them. A test compares every field and
// its type with the JSON schema of the pydantic model of the same name: a drift fails there.

export type JobState =
  | "QUEUED"
  | "PLACING"
  | "STARTING"
  | "RUNNING"
  | "PAUSING"
  | "PAUSED"
  | "RESTARTING"
  | "CANCELLING"
  | "CANCELLED"
  | "SUCCEEDED"
  | "FAILED";

export type ExitReason =
  | "completed"
  | "cancelled"
  | "paused"
  | "killed"
  | "user_error"
  | "rank_lost"
  | "node_lost"
  | "launch_failed"
  | "checkpoint_failed"
  | "restarts_exhausted"
  | "preempted"
  | "node_drained"
  | "resized"
  | "hang"
  | "nan"
  | "infeasible";

export type FailureClass =
  | "crash"
  | "out_of_memory"
  | "frozen"
  | "gil_held"
  | "collective_mismatch"
  | "data_stall"
  | "nan"
  | "node_lost"
  | "killed_by_operator"
  | "user_error"
  | "hang"
  | "launch_failed"
  | "checkpoint_failed"
  | "none";

export type CheckpointState = "WRITING" | "SEALED" | "COMMITTED" | "ABORTED" | "CORRUPT" | "DELETING";

export type TraceState = "REQUESTED" | "RECORDING" | "DONE" | "FAILED";

export type NodeState = "READY" | "DRAINING" | "LOST";

export interface Progress {
  step: number;
  of: number | null;
  loss: number | null;
  tokens_per_s: number | null;
  throughput_unit: "tokens" | "samples";
  loss_unit: "nats" | "";
  step_time_s: number | null;
  mfu: number | null;
  eta_s: number | null;
  metrics: Record<string, number | null>;
}

export interface Evaluation {
  step: number;
  loss: number | null;
  tokens: number;
  baselines: Record<string, number>;
  metrics: Record<string, number | null>;
}

export interface FailureView {
  rank: number | null;
  node_id: string | null;
  phase: string | null;
  step: number | null;
  exit_code: number | null;
  signal: string | null;
  error: string | null;
  traceback: string | null;
}

export interface AttemptView {
  fence: number;
  world_size: number;
  mesh: MeshPlan | null;
  node_ids: string[];
  resumed_from: string | null;
  started_at: string;
  first_step_at: string | null;
  ended_at: string | null;
  first_step: number | null;
  last_step: number | null;
  lost_steps: number | null;
  exit_reason: ExitReason | null;
  failure: FailureView | null;
  time_to_detect_s: number | null;
  time_to_restart_s: number | null;
  time_to_first_step_s: number | null;
}

export interface Factory {
  factory: string;
  args: Record<string, unknown>;
}

export interface ParameterGroup {
  match: string;
  [option: string]: unknown;
}

export interface OptimizerSpec {
  factory: string;
  args: Record<string, unknown>;
  groups: ParameterGroup[];
}

export interface EmaSpec {
  decay: number;
  every: number;
}

export interface PrecisionSpec {
  params: "fp32" | "bf16" | "fp16";
  reduce: "fp32" | "bf16" | "fp16";
}

export interface EarlyStopSpec {
  metric: string;
  mode: "min" | "max";
  patience: number;
  min_delta: number;
}

export interface TrainSpec {
  steps: number;
  global_batch: number;
  micro_batch: number | "auto";
  clip_norm: number | null;
  seed: number;
  precision: PrecisionSpec;
  eval_every: number;
  ema: EmaSpec | null;
  deterministic: boolean;
  early_stop: EarlyStopSpec | null;
}

export interface ResourceSpec {
  ranks: number;
  device: "auto" | "cpu" | "cuda";
  world: WorldSpec | null;
  memory_gib: number | null;
}

export interface WorldSpec {
  min: number;
  max: number;
}

export interface MeshSpec {
  dp_replicate: number;
  dp_shard: number;
  tp: number;
}

export interface KeepBestSpec {
  metric: string;
  mode: "min" | "max";
  count: number;
}

export interface CheckpointSpec {
  every_steps: number;
  keep_last: number;
  mode: "sync" | "async";
  keep_best: KeepBestSpec | null;
}

export interface FaultSpec {
  max_restarts: number;
  on_nan: "stop" | "rollback";
  hang_timeout_s: number | "auto";
}

export interface EntryPoint {
  script: string | null;
  module: string | null;
  args: string[];
}

export interface SecretReference {
  secret: string;
}

export interface WandbSpec {
  project: string | null;
  entity: string | null;
  mode: "online" | "offline";
  base_url: string | null;
  api_key: SecretReference | null;
  tags: string[];
}

export interface MlflowSpec {
  tracking_uri: string | null;
  experiment: string | null;
  token: SecretReference | null;
  username: SecretReference | null;
  password: SecretReference | null;
}

export interface MetricsSpec {
  wandb: WandbSpec | null;
  mlflow: MlflowSpec | null;
}

export interface EvaluationSpec {
  metrics: Factory;
  at_steps: boolean;
}

export interface JobSpec {
  name: string;
  entrypoint: EntryPoint | null;
  trainable: Factory | null;
  model: Factory | null;
  data: Factory | null;
  loss: Factory | null;
  code: string | null;
  optimizer: OptimizerSpec;
  schedule: Factory;
  train: TrainSpec;
  evaluation: EvaluationSpec | null;
  resources: ResourceSpec;
  mesh: MeshSpec | "auto";
  plan: Record<string, unknown> | "auto" | "default";
  checkpoint: CheckpointSpec;
  faults: FaultSpec;
  metrics: MetricsSpec | null;
  priority: number;
  labels: Record<string, string>;
}

export interface RankPlacement {
  rank: number;
  node_id: string;
  local_rank: number;
  device: string;
}

export interface MeshPlan {
  dp_replicate: number;
  dp_shard: number;
  tp: number;
}

export interface ShardDim {
  parameter: string;
  dim: number;
}

export interface UnitPlan {
  modules: string[];
  reshard_after_forward: boolean | number | null;
  param_dtype: "fp64" | "fp32" | "bf16" | "fp16" | null;
  reduce_dtype: "fp64" | "fp32" | "bf16" | "fp16" | null;
  offload: boolean;
  shard_dims: ShardDim[];
  prefetch: number | null;
  recompute: boolean;
  compile: boolean;
}

export interface TensorParallelPlan {
  modules: string[];
  style: "colwise" | "rowwise" | "colwise_gather";
}

export interface ShardingPlan {
  mesh: MeshPlan;
  units: UnitPlan[];
  param_dtype: "fp64" | "fp32" | "bf16" | "fp16" | null;
  reduce_dtype: "fp64" | "fp32" | "bf16" | "fp16" | null;
  output_dtype: "fp64" | "fp32" | "bf16" | "fp16" | null;
  tensor_parallel: TensorParallelPlan[];
  shared_memory: "auto" | "none" | "copy" | "storage";
  version: number;
}

export interface GangPlan {
  device_type: "cpu" | "cuda";
  sharding: ShardingPlan;
  ranks: RankPlacement[];
}

export interface CloneOrigin {
  job_id: string;
  checkpoint_id: string | null;
  step: number;
}

export interface MemoryView {
  parameters: number;
  buffers: number;
  gradients: number;
  optimizer: number;
  unsharded: number;
  whole_gradients: number;
  activations: number;
  communication: number;
  workspace: number;
  total: number;
}

export interface EstimateView {
  plan_id: string;
  reason: string;
  peak: MemoryView;
  where: string;
  unit: string;
  host_bytes: number;
  micro_batch: number;
  step_time_s: number | null;
  probe_id: string | null;
  time_scale: number;
  model_flops: number | null;
  peak_flops: number | null;
  measured_peak_bytes: number | null;
  measured_as: "resident_growth" | "allocated" | null;
  ratio: number | null;
}

export interface JobView {
  id: string;
  name: string;
  state: JobState;
  reason: string | null;
  exit_reason: ExitReason | null;
  failure: FailureView | null;
  progress: Progress;
  evaluation: Evaluation | null;
  attempt: number;
  restarts: number;
  world_size: number;
  world: WorldSpec | null;
  plan: GangPlan | null;
  estimate: EstimateView | null;
  latest_checkpoint: string | null;
  cloned_from: CloneOrigin | null;
  revision: number;
  priority: number;
  labels: Record<string, string>;
  owner: string;
  created_at: string;
  updated_at: string;
  started_at: string | null;
  ended_at: string | null;
  spec: JobSpec;
}

export interface JobPage {
  items: JobView[];
  next_cursor: string | null;
}

export interface RankView {
  rank: number;
  local_rank: number;
  node_id: string;
  device: string;
  pid: number | null;
  phase: string;
  unit: string | null;
  step: number;
  step_time_s: number | null;
  data_wait_s: number | null;
  arrival_lag_s: number | null;
  straggler_score: number | null;
  is_straggler: boolean;
  collectives_behind: number;
  loss: number | null;
  tokens_per_s: number | null;
  memory_bytes: number;
  peak_bytes: number | null;
  issued: Record<string, number>;
  completed: Record<string, number>;
  last_seen_at: string | null;
  beat_age_s: number | null;
}

export interface RankList {
  attempt: number;
  throughput_unit: "tokens" | "samples";
  items: RankView[];
}

export interface RankStacks {
  rank: number;
  fence: number;
  node_id: string;
  text: string;
}

export interface DiagnosisView {
  job_id: string;
  attempt: number;
  at: string;
  live: boolean;
  verdict: FailureClass;
  rank: number | null;
  node_id: string | null;
  summary: string;
  evidence: string[];
  advice: string;
  stacks: RankStacks[];
}

export interface EventView {
  id: string;
  at: string;
  job_id: string;
  kind: string;
  message: string;
  actor: string;
  request_id: string | null;
  data: Record<string, unknown>;
}

export interface EventPage {
  items: EventView[];
  next_cursor: string | null;
}

export interface LogView {
  rank: number;
  fence: number;
  stream: "stdout" | "stderr";
  level: "debug" | "info" | "warning" | "error";
  time_ms: number;
  text: string;
  id: string;
}

export interface LogPage {
  items: LogView[];
  next_cursor: string | null;
}

export interface StepView {
  step: number;
  fence: number;
  loss: number | null;
  grad_norm: number | null;
  learning_rate: number | null;
  tokens_per_s: number;
  step_time_s: number;
  of: number | null;
  mfu: number | null;
  data_wait_s: number | null;
}

export interface MetricPoint {
  step: number;
  fence: number;
  values: Record<string, number | null>;
}

export interface MetricsView {
  items: StepView[];
  user_metrics: MetricPoint[];
  evaluations: Evaluation[];
  total: number;
  names: string[];
  names_left_out: number;
  throughput_unit: "tokens" | "samples";
  loss_unit: "nats" | "";
}

export interface ShardView {
  rank: number;
  name: string;
  bytes: number;
  sha256: string;
}

export interface ExportView {
  state: "RUNNING" | "DONE" | "FAILED";
  folder: string;
  files: string[];
  bytes: number;
  reason: string | null;
}

export interface CheckpointView {
  id: string;
  job_id: string;
  state: CheckpointState;
  step: number;
  fence: number;
  world_size: number;
  bytes: number;
  loss: number | null;
  evaluation: Record<string, number | null>;
  best: boolean;
  reason: string | null;
  votes: number;
  shards: ShardView[];
  created_at: string;
  committed_at: string | null;
  verified_at: string | null;
  checked_at: string | null;
  corrupt_file: string | null;
  pinned: boolean;
  held_by: string[];
  export: ExportView | null;
}

export interface CheckpointList {
  items: CheckpointView[];
}

export interface TraceFileView {
  rank: number;
  node_id: string;
  path: string;
  bytes: number;
  first_step: number;
  last_step: number;
}

export interface TraceView {
  id: string;
  job_id: string;
  state: TraceState;
  attempt: number;
  steps: number;
  ranks: number[];
  folder: string;
  files: TraceFileView[];
  bytes: number;
  reason: string | null;
  created_at: string;
  ended_at: string | null;
}

export interface TraceList {
  items: TraceView[];
}

export interface Device {
  index: number;
  name: string;
  memory_bytes: number;
}

export interface Inventory {
  hostname: string;
  cpu_slots: number;
  cpu_count: number;
  memory_bytes: number;
  accelerators: Device[];
  versions: Record<string, string>;
}

export interface Exchange {
  latency: number;
  bandwidth: number;
}

export interface NodeFacts {
  matmul_flops: Record<string, number>;
  memory_bandwidth: number;
  link_bandwidth: number;
  network_bandwidth: number;
  collective_latency: number;
  ranks: number;
  overlap: number;
  dispatch_s: number;
  exchanges: Record<string, Exchange>;
  shared_exchanges: Record<string, Record<string, Exchange>>;
  unit_s: number;
  parameter_s: number;
  sharded_parameter_s: number;
  update_s: number;
  norm_s: number;
  scale: number;
}

export interface MeasuredView {
  facts: NodeFacts | null;
  failure: string | null;
  measured_at: string;
}

export interface NodeView {
  id: string;
  state: NodeState;
  inventory: Inventory;
  cpu_slots_used: number;
  accelerators_used: number;
  jobs: string[];
  joined_at: string;
  lease_s: number | null;
  measured: Record<string, MeasuredView>;
}

export interface NodeList {
  items: NodeView[];
}

export type PlanState = "PROBING" | "READY" | "FAILED";

export interface PlanSummary {
  id: string;
  state: PlanState;
  reason: string;
  feasible: boolean | null;
  name: string;
  owner: string;
  created_at: string;
  expires_at: string;
  ranks: number;
  device_type: "cpu" | "cuda" | null;
  mesh: MeshPlan | null;
  micro_batch: number | null;
  peak_bytes: number | null;
  memory_limit_bytes: number | null;
  step_time_s: number | null;
}

export interface PlanList {
  items: PlanSummary[];
  next_cursor: string | null;
}

export interface AxisTraffic {
  axis: string;
  ranks: number;
  bytes_sent: number;
  collectives: number;
  seconds: number | null;
}

export interface PlanAlternative {
  title: string;
  mesh: MeshPlan;
  micro_batch: number;
  peak_bytes: number | null;
  step_time_s: number | null;
  fits: boolean;
  lost_because: string;
}

export interface PlanFailure {
  code: "timed_out" | "out_of_memory" | "crashed" | "refused" | "raised" | "wrong_spec" | "no_answer" | "search_failed";
  reason: string;
  advice: string;
  traceback: string | null;
}

export interface PlanProbe {
  id: string;
  node_id: string;
  cached: boolean;
  took_s: number | null;
}

export interface PlanUnit {
  modules: string[];
  parameters: number;
  rank_bytes: number;
  reshard_after_forward: boolean | number;
  param_dtype: string | null;
  reduce_dtype: string | null;
  recompute: boolean;
  offload: boolean;
  prefetch: number | null;
  compile: boolean;
  shared_memory: "copy" | "storage" | null;
}

export interface RankMemory {
  ranks: number[];
  peak: MemoryView;
  where: string;
  unit: string;
  resting: MemoryView;
  host_bytes: number;
}

export interface StepTimeView {
  compute_s: number;
  optimizer_s: number;
  total_s: number;
  tokens_per_s: number;
  scale: number;
}

export interface PlanView {
  feasible: boolean | null;
  reasons: string[];
  advice: string[];
  device_type: "cpu" | "cuda" | null;
  mesh: MeshPlan | null;
  sharding: ShardingPlan | null;
  micro_batch: number | null;
  accumulation: number | null;
  units: PlanUnit[];
  memory: RankMemory[];
  memory_limit_bytes: number | null;
  traffic: AxisTraffic[];
  step_time: StepTimeView | null;
  model_flops: number | null;
  peak_flops: number | null;
  alternatives: PlanAlternative[];
  ranks: RankPlacement[];
  placement: string | null;
  id: string;
  state: PlanState;
  reason: string;
  failure: PlanFailure | null;
  probe: PlanProbe;
  owner: string;
  created_at: string;
  expires_at: string;
  spec: JobSpec;
}

export interface AttemptList {
  items: AttemptView[];
  left_out: number;
}

export interface StopRequest {
  checkpoint: "required" | "best_effort" | "none";
  grace_s: number;
}

export interface ResumeRequest {
  from_checkpoint: string | null;
}

export interface Fault {
  pointer: string;
  detail: string;
  code: string;
}

export interface Problem {
  type: string;
  title: string;
  status: number;
  code: string;
  detail: string;
  instance: string | null;
  request_id: string | null;
  errors: Fault[];
}
