// A Python traceback as frames, so that people see their own code first.

export interface Frame {
  file: string;
  line: number;
  name: string;
  /** The line of source, if the traceback has it. */
  code: string;
  /** Of Meshloom, of Python or of an installed package: not what the user wrote. */
  foreign: boolean;
}

// An unpacked archive of the user's code is on none of these paths.
const FOREIGN =
  /^<frozen |\/(site|dist)-packages\/|\/lib\/python3[^/]*\/|(^|\/)fsdp_core\/|(^|\/)services\/(contract|controller|local|worker)\/|(^|\/)meshloom\/(trainable|session)\.py$/;
const PLACE = /^ {2,}File "(.+)", line (\d+)(?:, in (.+))?$/;

/** The frames in the order of the text, outermost first; of chained exceptions all of them. */
export function framesOf(traceback: string): Frame[] {
  const lines = traceback.split("\n");
  return lines.flatMap((text, index) => {
    const found = PLACE.exec(text);
    if (!found) return [];
    const [, file = "", line = "0", name = ""] = found;
    const next = lines[index + 1] ?? "";
    const code = next.startsWith("    ") && !PLACE.test(next) ? next.trim() : "";
    return [{ file, line: Number(line), name, code, foreign: FOREIGN.test(file.replaceAll("\\", "/")) }];
  });
}

/** The innermost frame of the user's code: where to look first. */
export function ownFrame(frames: Frame[]): Frame | null {
  return frames.findLast((frame) => !frame.foreign) ?? null;
}
