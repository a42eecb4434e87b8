import { defineConfig } from "vite";

// What comes out is committed, so that running needs no Node. Everything that could differ between
// two builds of the same sources (time, paths, source maps) stays out of it: a test rebuilds and
// compares byte for byte.
export default defineConfig({
  base: "./",
  build: {
    outDir: "bundle",
    emptyOutDir: true,
    target: "es2023",
    // Everything is a file of our origin: the content security policy allows no data: or inline.
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    sourcemap: false,
    reportCompressedSize: false,
    license: { fileName: "assets/licenses.md" },
    rolldownOptions: {
      // React's "use client" says nothing where there is no server.
      onLog: (level, log, report) => {
        if (log.code !== "MODULE_LEVEL_DIRECTIVE") report(level, log);
      },
    },
  },
  server: { proxy: { "/v1": "http://127.0.0.1:8400", "/version": "http://127.0.0.1:8400" } },
});
