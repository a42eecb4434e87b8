// Files that the page itself makes.

/** Have the browser keep `blob` under `name`, which may hold any characters. */
export function download(name: string, blob: Blob): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name.replace(/[^\w.-]+/g, "-");
  link.click();
  // The browser has taken the address by then; kept, it would keep the blob.
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
