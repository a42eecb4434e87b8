// Where each rank of a grid is drawn: blocks side by side, a cell a rank, as large as there is room for.

import type { MeshPlan, RankPlacement } from "../api/types";

export type Grouping = "mesh" | "node";

export interface Cell {
  rank: number;
  x: number;
  y: number;
}

export interface Block {
  title: string;
  x: number;
  y: number;
  width: number;
  height: number;
}

export interface Layout {
  /** Of a cell's side, the gap to the next one included. */
  cell: number;
  width: number;
  height: number;
  cells: Cell[];
  blocks: Block[];
}

type Axis = "dp_replicate" | "dp_shard" | "tp";
const AXES: Axis[] = ["dp_replicate", "dp_shard", "tp"];
const CELLS = [46, 36, 28, 22, 17, 13, 10, 8, 6];
const HEIGHT_WANTED = 420;
const GAP = 10;
const TITLE = 18;
// Below this a title is wider than its block.
const TITLED_FROM = 13;

export function wideAxes(mesh: MeshPlan): Axis[] {
  const wide = AXES.filter((axis) => mesh[axis] > 1);
  return wide.length > 0 ? wide : ["dp_shard"];
}

/** Where a rank stands along each axis; tp is innermost. */
export function coordinates(rank: number, mesh: MeshPlan): Record<Axis, number> {
  return {
    tp: rank % mesh.tp,
    dp_shard: Math.floor(rank / mesh.tp) % mesh.dp_shard,
    dp_replicate: Math.floor(rank / (mesh.tp * mesh.dp_shard)),
  };
}

interface Group {
  title: string;
  ranks: number[];
  columns: number;
}

/** A block a copy of the model, or a node; within it a row a tp group where there is tp. */
function groupsOf(seats: RankPlacement[], mesh: MeshPlan, grouping: Grouping): Group[] {
  const groups = new Map<string, number[]>();
  for (const { rank, node_id } of seats) {
    const title = grouping === "node" ? node_id : mesh.dp_replicate > 1 ? `dp_replicate ${coordinates(rank, mesh).dp_replicate}` : "";
    const known = groups.get(title);
    if (known) known.push(rank);
    else groups.set(title, [rank]);
  }
  return [...groups].map(([title, ranks]) => {
    const square = Math.ceil(Math.sqrt(2 * ranks.length));
    // Whole tp groups in a row, as many as make the block about twice as wide as high.
    const columns = mesh.tp > 1 ? mesh.tp * Math.max(1, Math.round(square / mesh.tp)) : Math.min(ranks.length, Math.max(square, 8));
    return { title, ranks, columns: Math.min(columns, ranks.length) };
  });
}

/** The largest cells with which all ranks fit into `width`, and into a screen's part of height if they can. */
export function layoutOf(seats: RankPlacement[], mesh: MeshPlan, grouping: Grouping, width: number): Layout {
  const groups = groupsOf(seats, mesh, grouping);
  let made = flow(groups, CELLS.at(-1) ?? 6, width);
  for (const cell of CELLS) {
    const tried = flow(groups, cell, width);
    if (tried.height > HEIGHT_WANTED || tried.width > width) continue;
    made = tried;
    break;
  }
  return made;
}

function flow(groups: Group[], cell: number, width: number): Layout {
  const cells: Cell[] = [];
  const blocks: Block[] = [];
  const head = cell >= TITLED_FROM && groups.some((group) => group.title !== "") ? TITLE : 0;
  let [x, y, rowHeight, widest] = [0, 0, 0, 0];
  for (const { title, ranks, columns } of groups) {
    const wide = Math.max(1, Math.min(columns, Math.floor(width / cell)));
    const block = { title, width: wide * cell, height: head + Math.ceil(ranks.length / wide) * cell };
    // A short block is as wide as its title needs.
    const taken = Math.max(block.width, head > 0 ? Math.min(7 * title.length, width) : 0);
    if (x > 0 && x + taken > width) {
      x = 0;
      y += rowHeight + GAP;
      rowHeight = 0;
    }
    blocks.push({ ...block, x, y });
    ranks.forEach((rank, at) => {
      cells.push({ rank, x: x + (at % wide) * cell, y: y + head + Math.floor(at / wide) * cell });
    });
    widest = Math.max(widest, x + taken);
    rowHeight = Math.max(rowHeight, block.height);
    x += taken + GAP;
  }
  return { cell, width: widest, height: y + rowHeight, cells, blocks };
}
