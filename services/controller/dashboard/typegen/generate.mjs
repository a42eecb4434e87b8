// node generate.mjs OPENAPI TYPES: writes the TypeScript types of all schemas of an OpenAPI document.
//
// A package of its own: the generator works by the API of TypeScript 5, which the dashboard's compiler
// no longer has. The two digests let a test without Node see that the types are those of the document,
// and that nobody wrote into them.

import { createHash } from "node:crypto";
import { readFileSync, writeFileSync } from "node:fs";
import openapiTS, { astToString } from "openapi-typescript";

const [openapi, types] = process.argv.slice(2);
if (!openapi || !types) {
  throw new Error("usage: node generate.mjs OPENAPI TYPES");
}

const digest = (text) => createHash("sha256").update(text).digest("hex");

const document = readFileSync(openapi, "utf-8");
// The dashboard names resources, never operations: those would triple the file.
const ast = await openapiTS(
  { ...JSON.parse(document), paths: {} },
  { alphabetize: true, rootTypes: true, rootTypesNoSchemaPrefix: true },
);
const body = astToString(ast);
writeFileSync(
  types,
  `// Written by \`npm run types\` from tests/controller/openapi.json; not to be edited.
// document ${digest(document)}
// types ${digest(body)}

${body}`,
);
