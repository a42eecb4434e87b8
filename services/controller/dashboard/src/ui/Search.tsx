import { type InputHTMLAttributes, useEffect, useRef, useState } from "react";

const TYPING_MS = 200;

interface SearchProps extends Omit<InputHTMLAttributes<HTMLInputElement>, "onChange" | "type" | "value"> {
  /** What is searched for, as the address has it. */
  text: string;
  onChange: (text: string) => void;
}

/** A field whose text goes into the address once typing stops; an address that changes otherwise goes into the field. */
export function Search({ text, onChange, ...rest }: SearchProps) {
  const [typed, setTyped] = useState(text);
  // The last that went either way: while more is typed, the field must not be set back to what it sent.
  const agreed = useRef(text);
  useEffect(() => {
    if (text.trim() === agreed.current.trim()) return;
    agreed.current = text;
    setTyped(text);
  }, [text]);
  useEffect(() => {
    if (typed === agreed.current) return;
    const timer = setTimeout(() => {
      agreed.current = typed;
      onChange(typed);
    }, TYPING_MS);
    return () => clearTimeout(timer);
  }, [typed, onChange]);
  return <input {...rest} type="search" className="search" value={typed} onChange={({ target }) => setTyped(target.value)} />;
}
