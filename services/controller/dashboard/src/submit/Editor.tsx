// CodeMirror in a React house. It lives in a shadow root, where it styles itself without inline style
// elements: the content security policy allows none.

import { autocompletion, type Completion, type CompletionContext, type CompletionResult, completionKeymap } from "@codemirror/autocomplete";
import { defaultKeymap, history, historyKeymap, indentLess, insertTab } from "@codemirror/commands";
import { yaml } from "@codemirror/lang-yaml";
import { HighlightStyle, indentUnit, syntaxHighlighting } from "@codemirror/language";
import { lintGutter, lintKeymap, setDiagnostics } from "@codemirror/lint";
import { EditorState } from "@codemirror/state";
import { drawSelection, EditorView, highlightActiveLine, keymap, lineNumbers } from "@codemirror/view";
import { tags } from "@lezer/highlight";
import { useEffect, useRef } from "react";
import type { SpecSchema } from "./schema";
import { cursorAt, type Mistake } from "./yaml";

interface Props {
  /** What stands there at first; from then on the editor owns the text. */
  text: string;
  label: string;
  schema: SpecSchema;
  mistakes: Mistake[];
  onChange: (text: string) => void;
}

const THEME = EditorView.theme({
  "&": { color: "var(--text)", backgroundColor: "var(--surface)", fontSize: "13px", height: "100%" },
  "&.cm-focused": { outline: "2px solid var(--focus)", outlineOffset: "-2px" },
  ".cm-content": { fontFamily: "var(--mono)", caretColor: "var(--text)" },
  ".cm-cursor": { borderLeftColor: "var(--text)" },
  ".cm-gutters": { backgroundColor: "var(--raised)", color: "var(--muted)", border: "none" },
  ".cm-activeLine": { backgroundColor: "color-mix(in srgb, var(--accent) 6%, transparent)" },
  "&.cm-focused .cm-selectionBackground, .cm-selectionBackground": { backgroundColor: "color-mix(in srgb, var(--accent) 22%, transparent)" },
  ".cm-tooltip": { backgroundColor: "var(--surface)", color: "var(--text)", border: "1px solid var(--line)" },
  ".cm-tooltip-autocomplete ul li[aria-selected]": { backgroundColor: "var(--accent)", color: "var(--accent-text)" },
  ".cm-completionInfo": { maxWidth: "360px", fontFamily: "var(--font)" },
  // CodeMirror's own marks are pictures in data addresses, which the policy allows no more than inline styles.
  ".cm-lint-marker-error": { content: "normal", width: "8px", height: "8px", margin: "4px", borderRadius: "50%", backgroundColor: "var(--bad)" },
  ".cm-lintRange-error": { backgroundImage: "none", textDecoration: "underline wavy var(--bad)" },
  ".cm-diagnostic-error": { borderLeftColor: "var(--bad)" },
});

// The page's own colours, so that both themes have enough contrast.
const COLORS = HighlightStyle.define([
  { tag: [tags.propertyName, tags.definition(tags.propertyName)], color: "var(--accent)" },
  { tag: tags.comment, color: "var(--muted)" },
  { tag: [tags.string, tags.special(tags.string)], color: "var(--good)" },
  { tag: [tags.number, tags.bool, tags.keyword, tags.atom], color: "var(--still)" },
  { tag: tags.invalid, color: "var(--bad)" },
]);

export function Editor({ text, label, schema, mistakes, onChange }: Props) {
  const holder = useRef<HTMLDivElement>(null);
  const view = useRef<EditorView | null>(null);
  const latest = useRef({ schema, onChange });
  latest.current = { schema, onChange };

  useEffect(() => {
    const element = holder.current;
    if (!element) return;
    const root = element.shadowRoot ?? element.attachShadow({ mode: "open" });
    const editor = new EditorView({
      parent: root,
      root,
      state: EditorState.create({
        doc: text,
        extensions: [
          lineNumbers(),
          history(),
          drawSelection(),
          highlightActiveLine(),
          indentUnit.of("  "),
          yaml(),
          syntaxHighlighting(COLORS),
          lintGutter(),
          autocompletion({ override: [(context) => complete(context, latest.current.schema)] }),
          // Tab indents, as in every editor; Escape and then Tab leaves it by keyboard.
          keymap.of([...completionKeymap, ...lintKeymap, ...historyKeymap, ...defaultKeymap, { key: "Tab", run: insertTab, shift: indentLess }]),
          EditorView.contentAttributes.of({ tabindex: "0", "aria-label": label, "aria-description": "Control-Space completes. Escape, then Tab, leaves the editor." }),
          EditorView.updateListener.of((update) => update.docChanged && latest.current.onChange(update.state.doc.toString())),
          THEME,
        ],
      }),
    });
    view.current = editor;
    return () => editor.destroy();
  }, []);

  useEffect(() => {
    const editor = view.current;
    if (!editor) return;
    const { length } = editor.state.doc;
    const shown = mistakes.map(({ from, to, message }) => ({
      from: Math.min(from, length),
      to: Math.min(Math.max(from, to), length),
      severity: "error" as const,
      message,
    }));
    editor.dispatch(setDiagnostics(editor.state, shown));
  }, [mistakes]);

  return <div ref={holder} className="editor" />;
}

/** Keys and values that the schema names for the place of the cursor. */
function complete(context: CompletionContext, schema: SpecSchema): CompletionResult | null {
  const { path, what, from, taken } = cursorAt(context.state.doc.toString(), context.pos);
  if (!context.explicit && from === context.pos) return null;
  const options: Completion[] =
    what === "key"
      ? schema.keys(path).filter(([key]) => !taken.includes(key)).map(([key, shape]) => ({
          label: key,
          type: "property",
          apply: `${key}: `,
          ...(shape.default === undefined ? {} : { detail: `default ${JSON.stringify(shape.default)}`.slice(0, 40) }),
          ...(shape.description ? { info: shape.description.replaceAll("``", "") } : {}),
        }))
      : schema.values(path).map((value) => ({ label: String(value), type: "constant" }));
  return options.length > 0 ? { from, options, validFor: /^[\w.-]*$/ } : null;
}
