import { QueryClientProvider } from "@tanstack/react-query";
import { StrictMode } from "react";
import { createRoot } from "react-dom/client";
import { App } from "./App";
import { queryClient } from "./api/queries";
import "./style/tokens.css";
import "./style/base.css";
import "./style/pages.css";
import "./style/plans.css";
import "./style/frame.css";
import "./style/lists.css";
import "./style/compare.css";
import "./style/logs.css";
import "./style/submit.css";
import "./style/ranks.css";
import "./style/widths.css";

const root = document.getElementById("root");
if (root) {
  createRoot(root).render(
    <StrictMode>
      <QueryClientProvider client={queryClient}>
        <App />
      </QueryClientProvider>
    </StrictMode>,
  );
}
