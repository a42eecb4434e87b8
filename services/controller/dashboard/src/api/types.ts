// Written by `npm run types` from tests/controller/openapi.json; not to be edited.
// document 0078d7813337368a28963b463aa1e7873621cbe90fe949e6c23293fce53bf408
// types 1ff191f5cabeb975b1dcf856596e50d9948a852b7718199436ad994b7f5111e4

export type paths = Record<string, never>;
export type webhooks = Record<string, never>;
export interface components {
    schemas: {
        /**
         * AttemptList
         * @description A job's attempts, oldest first: the first one and the newest 20.
         *
         *     ``left_out``: how many between them are no longer kept.
         */
        AttemptList: {
            /** Items */
            items: components["schemas"]["AttemptView"][];
            /**
             * Left Out
             * @default 0
             */
            left_out: number;
        };
        /**
         * AttemptView
         * @description One numbered attempt of a job, and its times in seconds, where they are known.
         *
         *     ``time_to_detect_s``: from the first rank's exit, or the last message of a lost node, until the
         *     controller decided. ``time_to_restart_s``: from there to the next attempt, if the job restarted
         *     by itself. ``time_to_first_step_s``: from the launch command to the first step.
         */
        AttemptView: {
            /** Ended At */
            ended_at: string | null;
            exit_reason: components["schemas"]["ExitReason"] | null;
            failure: components["schemas"]["FailureView"] | null;
            /** Fence */
            fence: number;
            /** First Step */
            first_step: number | null;
            /** First Step At */
            first_step_at: string | null;
            /** Last Step */
            last_step: number | null;
            /** Lost Steps */
            lost_steps: number | null;
            mesh: components["schemas"]["MeshPlan"] | null;
            /** Node Ids */
            node_ids: string[];
            /** @description null: the loss of any rank ends the attempt */
            replicas: components["schemas"]["ReplicasView"] | null;
            /** Resumed From */
            resumed_from: string | null;
            /**
             * Started At
             * Format: date-time
             */
            started_at: string;
            /** Time To Detect S */
            time_to_detect_s: number | null;
            /** Time To First Step S */
            time_to_first_step_s: number | null;
            /** Time To Restart S */
            time_to_restart_s: number | null;
            /** World Size */
            world_size: number;
        };
        /**
         * AuditEntryView
         * @description A request that changed something or was refused, and its outcome.
         */
        AuditEntryView: {
            /**
             * Actor
             * @description null: the caller did not authenticate
             */
            actor: string | null;
            /**
             * At
             * Format: date-time
             */
            at: string;
            /** Id */
            id: string;
            /**
             * Left Out
             * @description earlier refusals like it that were not recorded: there were too many
             * @default 0
             */
            left_out: number;
            /** Method */
            method: string;
            /**
             * Outcome
             * @description done, refused or failed
             */
            outcome: string;
            /** Path */
            path: string;
            /** Request Id */
            request_id: string;
            scope: components["schemas"]["Scope"] | null;
            /** Status */
            status: number;
        };
        /**
         * AuditPage
         * @description The audit trail, newest first.
         */
        AuditPage: {
            /** Items */
            items: components["schemas"]["AuditEntryView"][];
            /** Next Cursor */
            next_cursor: string | null;
        };
        /**
         * AxisTraffic
         * @description What one rank sends along a mesh axis in a step. ``seconds``: without any overlap.
         */
        AxisTraffic: {
            /** Axis */
            axis: string;
            /** Bytes Sent */
            bytes_sent: number;
            /** Collectives */
            collectives: number;
            /** Ranks */
            ranks: number;
            /** Seconds */
            seconds: number | null;
        };
        /**
         * BestPatch
         * @description Which committed checkpoints are the best, and how many are kept; null: the default.
         */
        BestPatch: {
            /** Count */
            count?: number | null;
            /** Metric */
            metric?: string | null;
            /** Mode */
            mode?: ("min" | "max") | null;
        };
        /**
         * BoundsPatch
         * @description The bounds of an elastic job; a ``min`` that is null is 1.
         */
        BoundsPatch: {
            /** Max */
            max?: number | null;
            /** Min */
            min?: number | null;
        };
        /**
         * BudgetPatch
         * @description How many restarts a run may need; null: the default.
         */
        BudgetPatch: {
            /** Max Restarts */
            max_restarts?: number | null;
        };
        /**
         * CapacityView
         * @description The slots of all nodes. ``largest_*`` is the largest gang that fits on one node now.
         */
        CapacityView: {
            /** Accelerators */
            accelerators: number;
            /** Accelerators Free */
            accelerators_free: number;
            /** Cpu Slots */
            cpu_slots: number;
            /** Cpu Slots Free */
            cpu_slots_free: number;
            /** Largest Cpu Gang */
            largest_cpu_gang: number;
            /** Largest Cuda Gang */
            largest_cuda_gang: number;
            /** Nodes */
            nodes: components["schemas"]["NodeCapacity"][];
        };
        /**
         * CheckpointList
         * @description A job's checkpoints, newest first.
         */
        CheckpointList: {
            /** Items */
            items: components["schemas"]["CheckpointView"][];
        };
        /**
         * CheckpointSpec
         * @description When to checkpoint and how many to keep (the last step is always checkpointed).
         */
        CheckpointSpec: {
            /**
             * Every Steps
             * @description Steps between checkpoints; 0: only after the last step.
             * @default 0
             */
            every_steps: number;
            /** @description Keeps the best checkpoints in addition; evaluates before each checkpoint. */
            keep_best?: components["schemas"]["KeepBestSpec"] | null;
            /**
             * Keep Last
             * @description How many of the newest committed checkpoints retention keeps: at most 8,192, with at most 65,536 shards (one for each rank) together.
             * @default 2
             */
            keep_last: number;
            /**
             * Mode
             * @description async: training continues while files are written; sync: it waits.
             * @default async
             * @enum {string}
             */
            mode: "sync" | "async";
        };
        /**
         * CheckpointState
         * @description The state of a checkpoint; jobs resume only from COMMITTED ones.
         * @enum {string}
         */
        CheckpointState: "WRITING" | "SEALED" | "COMMITTED" | "ABORTED" | "CORRUPT" | "DELETING";
        /**
         * CheckpointView
         * @description A checkpoint. Jobs resume only from COMMITTED ones.
         *
         *     ``verified_at``: when a node last read every file and found what was committed. ``checked_at``:
         *     when a node last finished reading, with either result. ``held_by``: jobs that begin from it.
         *     ``corrupt_file``: below the job's folder, what differs or is missing. ``evaluation``: the
         *     validation ``loss`` after its step, and metrics; empty without a pass at it. ``best``: of the
         *     job's, by ``checkpoint.keep_best``, else by the validation loss.
         */
        CheckpointView: {
            /**
             * Best
             * @default false
             */
            best: boolean;
            /**
             * Bytes
             * @default 0
             */
            bytes: number;
            /** Checked At */
            checked_at: string | null;
            /** Committed At */
            committed_at: string | null;
            /** Corrupt File */
            corrupt_file: string | null;
            /**
             * Created At
             * Format: date-time
             */
            created_at: string;
            /**
             * Evaluation
             * @default {}
             */
            evaluation: {
                [key: string]: number | null;
            };
            export: components["schemas"]["ExportView"] | null;
            /** Fence */
            fence: number;
            /**
             * Held By
             * @default []
             */
            held_by: string[];
            /** Id */
            id: string;
            /** Job Id */
            job_id: string;
            /** Loss */
            loss: number | null;
            /**
             * Pinned
             * @default false
             */
            pinned: boolean;
            /** Reason */
            reason: string | null;
            /**
             * Shards
             * @default []
             */
            shards: components["schemas"]["ShardView"][];
            state: components["schemas"]["CheckpointState"];
            /** Step */
            step: number;
            /** Verified At */
            verified_at: string | null;
            /**
             * Votes
             * @default 0
             */
            votes: number;
            /** World Size */
            world_size: number;
        };
        /**
         * CloneOrigin
         * @description The job of which this one is a clone, and the checkpoint and step from which it starts.
         */
        CloneOrigin: {
            /** Checkpoint Id */
            checkpoint_id: string | null;
            /** Job Id */
            job_id: string;
            /**
             * Step
             * @default 0
             */
            step: number;
        };
        /**
         * CloneRequest
         * @description How the clone differs from the cloned job, and where it starts.
         *
         *     ``overrides`` is a merge-patch on the job's spec. ``from_checkpoint`` names a committed
         *     checkpoint of the cloned job, its ``latest``, or its ``best`` by ``checkpoint.keep_best``, else by
         *     the validation loss; without one the clone starts over.
         */
        CloneRequest: {
            /** From Checkpoint */
            from_checkpoint?: string | ("latest" | "best") | null;
            /** Overrides */
            overrides?: {
                [key: string]: components["schemas"]["JsonValue"];
            };
        };
        /**
         * CodeView
         * @description An uploaded archive of code, by its digest. Only nodes read its content.
         */
        CodeView: {
            /** Bytes */
            bytes: number;
            /** Digest */
            digest: string;
            /** Files */
            files: number;
            /** Unpacked Bytes */
            unpacked_bytes: number;
            /**
             * Uploaded At
             * Format: date-time
             */
            uploaded_at: string;
            /** Uploaded By */
            uploaded_by: string;
        };
        /**
         * Device
         * @description One accelerator of a node.
         */
        Device: {
            /** Index */
            index: number;
            /** Memory Bytes */
            memory_bytes: number;
            /** Name */
            name: string;
        };
        /**
         * DiagnosisView
         * @description What is wrong with an attempt, or what ended it: the verdict, its evidence, and what to do.
         *
         *     ``rank`` is the first one in trouble, None where no single rank is. ``live`` says that it was
         *     made of running ranks. ``stacks`` are present if ranks were inspected.
         */
        DiagnosisView: {
            /** Advice */
            advice: string;
            /**
             * At
             * Format: date-time
             */
            at: string;
            /** Attempt */
            attempt: number;
            /**
             * Evidence
             * @default []
             */
            evidence: string[];
            /** Job Id */
            job_id: string;
            /** Live */
            live: boolean;
            /** Node Id */
            node_id: string | null;
            /** Rank */
            rank: number | null;
            /**
             * Stacks
             * @default []
             */
            stacks: components["schemas"]["RankStacks"][];
            /** Summary */
            summary: string;
            verdict: components["schemas"]["FailureClass"];
        };
        /**
         * DrainRequest
         * @description How long running gangs may take to checkpoint before they are killed.
         */
        DrainRequest: {
            /**
             * Grace S
             * @default 60
             */
            grace_s: number;
        };
        /**
         * EarlyStopSpec
         * @description Ends the run successfully once evaluations no longer improve.
         *
         *     That is after ``patience`` evaluations in a row of which none was better than the best one before
         *     them by more than ``min_delta``.
         */
        EarlyStopSpec: {
            /**
             * Metric
             * @description The validation metric that decides; loss is the validation loss.
             * @default loss
             */
            metric: string;
            /**
             * Min Delta
             * @description An improvement must be larger than this.
             * @default 0
             */
            min_delta: number;
            /**
             * Mode
             * @description min: lower is better; max: higher is better.
             * @default min
             * @enum {string}
             */
            mode: "min" | "max";
            /**
             * Patience
             * @description Evaluations in a row without an improvement after which training ends.
             */
            patience: number;
        };
        /**
         * EmaSpec
         * @description An exponential moving average of the weights, with which validation is done.
         *
         *     After every ``every`` steps it becomes ``decay`` of itself and ``1 - decay`` of the weights.
         */
        EmaSpec: {
            /**
             * Decay
             * @description The average becomes decay of itself plus 1 - decay of the weights.
             * @default 0.999
             */
            decay: number;
            /**
             * Every
             * @description Steps between updates of the average.
             * @default 1
             */
            every: number;
        };
        /**
         * EntryPoint
         * @description A script that runs in each rank as torchrun would run it; either ``script`` or ``module``.
         *
         *     ``script`` is a path below the job's uploaded code or below a folder of ``MESHLOOM_USER_PATH``,
         *     without ``..``; ``module`` is a dotted name, as for ``python -m``.
         */
        EntryPoint: {
            /**
             * Args
             * @description Command-line arguments of the script or module.
             * @default []
             */
            args: string[];
            /**
             * Module
             * @description A dotted module name, as for `python -m`.
             */
            module?: string | null;
            /**
             * Script
             * @description Path of the script, below the uploaded code or a folder of MESHLOOM_USER_PATH.
             */
            script?: string | null;
        };
        /**
         * EstimateView
         * @description The same beside what the ranks of the newest attempt were seen to use.
         *
         *     ``measured_peak_bytes``: the most that the steps of any rank took. ``measured_as``:
         *     ``resident_growth``, on CPUs, is the most that was resident in its first steps, less files,
         *     what the process held before it built the model, and copies for checkpoints; ``allocated``, on
         *     GPUs, is the most that PyTorch's allocator had given out. ``ratio``: measured to estimated; None
         *     if less than 64 MiB (2 MiB on GPUs) was estimated, which other things take in any process.
         *     ``measured_fragments_bytes``, on GPUs: the most that the allocator of any rank held over its peak.
         */
        EstimateView: {
            /**
             * Host Bytes
             * @default 0
             */
            host_bytes: number;
            /** Measured As */
            measured_as: ("resident_growth" | "allocated") | null;
            /** Measured Fragments Bytes */
            measured_fragments_bytes: number | null;
            /** Measured Peak Bytes */
            measured_peak_bytes: number | null;
            /** Micro Batch */
            micro_batch: number;
            /** Model Flops */
            model_flops: number | null;
            peak: components["schemas"]["MemoryView"];
            /** Peak Flops */
            peak_flops: number | null;
            /** Plan Id */
            plan_id: string;
            /** Probe Id */
            probe_id: string | null;
            /** Ratio */
            ratio: number | null;
            /**
             * Reason
             * @default
             */
            reason: string;
            /** Step Time S */
            step_time_s: number | null;
            /**
             * Time Scale
             * @default 1
             */
            time_scale: number;
            /** Unit */
            unit: string;
            /** Where */
            where: string;
        };
        /**
         * Evaluation
         * @description A validation pass: mean loss, and for comparison the losses of simple models.
         *
         *     ``tokens``: over how many, or over how many samples. A loss that is no finite number is null.
         */
        Evaluation: {
            /**
             * Baselines
             * @default {}
             */
            baselines: {
                [key: string]: number;
            };
            /** Loss */
            loss: number | null;
            /**
             * Metrics
             * @description the user's, at most 16
             * @default {}
             */
            metrics: {
                [key: string]: number | null;
            };
            /** Step */
            step: number;
            /** Tokens */
            tokens: number;
        };
        /**
         * EvaluationSpec
         * @description What evaluations measure in addition to the loss.
         *
         *     ``metrics`` names a callable from the model's output and a batch to a dict of numbers, each the mean
         *     over the batch.
         */
        EvaluationSpec: {
            /**
             * At Steps
             * @description Compute them at each training step, too.
             * @default false
             */
            at_steps: boolean;
            /** @description A callable (output, batch) that returns a dict of numbers, each the mean over the batch. */
            metrics: components["schemas"]["Factory"];
        };
        /**
         * EventPage
         * @description Events, oldest first.
         */
        EventPage: {
            /** Items */
            items: components["schemas"]["EventView"][];
            /** Next Cursor */
            next_cursor: string | null;
        };
        /**
         * EventView
         * @description Something that happened to a job. ``id`` resumes a stream (``Last-Event-ID``).
         */
        EventView: {
            /** Actor */
            actor: string;
            /**
             * At
             * Format: date-time
             */
            at: string;
            /**
             * Data
             * @default {}
             */
            data: {
                [key: string]: unknown;
            };
            /** Id */
            id: string;
            /** Job Id */
            job_id: string;
            /**
             * Kind
             * @description such as job.queued, attempt.started, checkpoint.committed
             */
            kind: string;
            /** Message */
            message: string;
            /** Request Id */
            request_id: string | null;
        };
        /**
         * Exchange
         * @description What one kind of collective takes within the engine, its copies and hooks included.
         *
         *     Attributes:
         *         latency: Seconds of the smallest.
         *         bandwidth: Bytes a second beyond that, of those that a rank sends in a ring.
         */
        Exchange: {
            /** Bandwidth */
            bandwidth: number;
            /** Latency */
            latency: number;
        };
        /**
         * ExitReason
         * @description Why a job or an attempt ended.
         * @enum {string}
         */
        ExitReason: "completed" | "cancelled" | "paused" | "killed" | "user_error" | "rank_lost" | "node_lost" | "launch_failed" | "checkpoint_failed" | "restarts_exhausted" | "preempted" | "node_drained" | "resized" | "hang" | "nan" | "out_of_memory" | "infeasible";
        /**
         * ExportedFile
         * @description One file of an export.
         */
        ExportedFile: {
            /** Bytes */
            bytes: number;
            /** Name */
            name: string;
            /** Sha256 */
            sha256: string;
        };
        /**
         * ExportManifest
         * @description All files of an export, each with its size and its SHA-256.
         */
        ExportManifest: {
            /** Files */
            files: components["schemas"]["ExportedFile"][];
        };
        /**
         * ExportView
         * @description The last export of a checkpoint. ``folder`` is below the storage root.
         */
        ExportView: {
            /**
             * Bytes
             * @default 0
             */
            bytes: number;
            /**
             * Files
             * @default []
             */
            files: string[];
            /** Folder */
            folder: string;
            /** Reason */
            reason: string | null;
            /**
             * State
             * @enum {string}
             */
            state: "RUNNING" | "DONE" | "FAILED";
        };
        /**
         * Factory
         * @description A built-in by its short name, or ``package.module:callable``, with keyword arguments.
         */
        Factory: {
            /**
             * Args
             * @description Keyword arguments of the callable.
             */
            args?: {
                [key: string]: components["schemas"]["JsonValue"];
            };
            /**
             * Factory
             * @description A built-in's short name, or module:callable of your code.
             */
            factory: string;
        };
        /**
         * FailureClass
         * @description What kind of trouble a diagnosis finds; ``NONE`` where the ranks make progress.
         * @enum {string}
         */
        FailureClass: "crash" | "out_of_memory" | "frozen" | "gil_held" | "collective_mismatch" | "data_stall" | "nan" | "node_lost" | "network" | "killed_by_operator" | "user_error" | "hang" | "launch_failed" | "checkpoint_failed" | "none";
        /**
         * FailureView
         * @description What ended an attempt: the first rank to fail, and its error.
         */
        FailureView: {
            /** Error */
            error: string | null;
            /** Exit Code */
            exit_code: number | null;
            /** Node Id */
            node_id: string | null;
            /** Phase */
            phase: string | null;
            /** Rank */
            rank: number | null;
            /** Signal */
            signal: string | null;
            /** Step */
            step: number | null;
            /** Traceback */
            traceback: string | null;
        };
        /**
         * Fault
         * @description One error of a request: where (a JSON pointer, RFC 6901, into the body) and what.
         */
        Fault: {
            /** Code */
            code: string;
            /** Detail */
            detail: string;
            /** Pointer */
            pointer: string;
        };
        /**
         * FaultSpec
         * @description What to do when something breaks.
         *
         *     ``on_nan``: a loss or gradient that is no finite number ends the job (``stop``), or its attempt,
         *     and the next one goes on from the last committed checkpoint (``rollback``, a counted restart).
         *     ``hang_timeout_s``: for how long no rank may make progress between steps; ``auto`` is 5 s or
         *     three usual steps, whichever is longer. ``on_replica_loss``: with ``continue`` replicas that live
         *     train on without a lost one, which gets its state back from their memory.
         */
        FaultSpec: {
            /**
             * Hang Timeout S
             * @description Seconds without progress on any rank that count as a hang; auto: 5 s or three usual steps, whichever is longer.
             * @default auto
             */
            hang_timeout_s: number | "auto";
            /**
             * Max Restarts
             * @description Failed attempts after which the job fails.
             * @default 3
             */
            max_restarts: number;
            /**
             * On Nan
             * @description When a loss or gradient is not finite: stop fails the job; rollback restarts from the last commit (counted).
             * @default stop
             * @enum {string}
             */
            on_nan: "stop" | "rollback";
            /**
             * On Replica Loss
             * @description continue: when a replica (mesh.dp_replicate) is lost, the others train on and it returns; null: the attempt ends and the job restarts.
             */
            on_replica_loss?: "continue" | null;
        };
        /**
         * FromPlan
         * @description A job by a plan: the plan's spec, with exactly its mesh and sharding.
         */
        FromPlan: {
            /** Plan Id */
            plan_id: string;
        };
        /**
         * GangPlan
         * @description Where and how the ranks of one attempt run.
         */
        GangPlan: {
            /**
             * Device Type
             * @enum {string}
             */
            device_type: "cpu" | "cuda";
            /** Ranks */
            ranks: components["schemas"]["RankPlacement"][];
            sharding: components["schemas"]["ShardingPlan"];
        };
        /**
         * Health
         * @description Liveness or readiness. ``checks`` has the status of each part.
         */
        Health: {
            /**
             * Checks
             * @default {}
             */
            checks: {
                [key: string]: string;
            };
            /**
             * Status
             * @enum {string}
             */
            status: "ok" | "unavailable";
        };
        /**
         * Inventory
         * @description The resources of a node. ``cpu_slots`` is how many CPU ranks it runs at a time.
         *
         *     ``storage_id``: the name that the storage of checkpoints has for all nodes that share it; None: unknown.
         *     ``storage_fault``: why no job can use it, as far as its agent has tried.
         */
        Inventory: {
            /**
             * Accelerators
             * @default []
             */
            accelerators: components["schemas"]["Device"][];
            /** Cpu Count */
            cpu_count: number;
            /** Cpu Slots */
            cpu_slots: number;
            /** Hostname */
            hostname: string;
            /** Memory Bytes */
            memory_bytes: number;
            /** Storage Fault */
            storage_fault: string | null;
            /** Storage Id */
            storage_id: string | null;
            /** Versions */
            versions: {
                [key: string]: string;
            };
        };
        /**
         * JobPage
         * @description A page of jobs, newest first.
         */
        JobPage: {
            /** Items */
            items: components["schemas"]["JobView"][];
            /** Next Cursor */
            next_cursor: string | null;
        };
        /**
         * JobPatch
         * @description The fields of a job that may be changed after it was submitted: a merge-patch on its spec.
         *
         *     A field that is left out stays as it is, null makes it the default again, and a label that is
         *     null is removed.
         */
        JobPatch: {
            /** @default {} */
            checkpoint: components["schemas"]["RetentionPatch"];
            /** @default {} */
            faults: components["schemas"]["BudgetPatch"];
            /** Labels */
            labels?: {
                [key: string]: string | null;
            } | null;
            /** Priority */
            priority?: number | null;
            /**
             * @default {
             *       "world": {}
             *     }
             */
            resources: components["schemas"]["ResourcesPatch"];
        };
        /**
         * JobSpec
         * @description Everything that a user decides about a job.
         *
         *     A job trains in Meshloom's loop, by ``model``, ``data`` and the related fields, or it runs an
         *     ``entrypoint``: then the fields that only the loop reads are left out. ``train.steps``, if it is
         *     not given either, is one more than there can be.
         *
         *     ``mesh`` and ``plan``, as far as they are left ``auto``, are chosen before the job's first attempt
         *     from what a node finds of the model. With the plan ``default`` the model is not profiled: all ranks in
         *     dp_shard unless ``mesh`` says otherwise, and the units that are known of a built-in model.
         *     ``code`` is the digest of an uploaded archive: ranks and probes of this job import from it first.
         */
        JobSpec: {
            /**
             * @description When to checkpoint and which checkpoints to keep.
             * @default {
             *       "every_steps": 0,
             *       "keep_last": 2,
             *       "mode": "async"
             *     }
             */
            checkpoint: components["schemas"]["CheckpointSpec"];
            /**
             * Code
             * @description SHA-256 of an uploaded code archive; the job imports from it first. `submit --code` sets it.
             */
            code?: string | null;
            /** @description The training data; optional where trainable builds it, required with model. */
            data?: components["schemas"]["Factory"] | null;
            /** @description A script or module that each rank runs with its own training loop, as torchrun would. */
            entrypoint?: components["schemas"]["EntryPoint"] | null;
            /** @description Metrics that are computed on validation data in addition to those of the loss. */
            evaluation?: components["schemas"]["EvaluationSpec"] | null;
            /**
             * @description How many restarts, and what counts as a hang.
             * @default {
             *       "hang_timeout_s": "auto",
             *       "max_restarts": 3,
             *       "on_nan": "stop"
             *     }
             */
            faults: components["schemas"]["FaultSpec"];
            /**
             * Labels
             * @description Your own keys and values, to filter lists by.
             */
            labels?: {
                [key: string]: string;
            };
            /** @description The loss; null: the model's own, else the cross entropy of the next token. */
            loss?: components["schemas"]["Factory"] | null;
            /**
             * Mesh
             * @description Sizes of the mesh axes; auto: the planner chooses them.
             * @default auto
             */
            mesh: components["schemas"]["MeshSpec"] | "auto";
            /** @description Experiment trackers that receive the metrics in addition to the API and TensorBoard files. */
            metrics?: components["schemas"]["MetricsSpec"] | null;
            /** @description A callable that returns the nn.Module to train; required without trainable or entrypoint. */
            model?: components["schemas"]["Factory"] | null;
            /**
             * Name
             * @description Shown in lists; need not be unique.
             * @default job
             */
            name: string;
            /**
             * @description The optimizer: adamw, or any callable that takes parameters.
             * @default {
             *       "args": {},
             *       "factory": "adamw",
             *       "groups": []
             *     }
             */
            optimizer: components["schemas"]["OptimizerSpec"];
            /**
             * Plan
             * @description The sharding plan: auto: the planner chooses; default: one unit a block without profiling; or fields of a plan, of which the planner fills in the rest.
             * @default auto
             */
            plan: {
                [key: string]: unknown;
            } | ("auto" | "default");
            /**
             * Priority
             * @description Jobs of higher priority are placed first and may preempt jobs of lower priority.
             * @default 0
             */
            priority: number;
            /**
             * @description How many ranks, on what kind of device, with how much host memory.
             * @default {
             *       "device": "auto",
             *       "ranks": 1
             *     }
             */
            resources: components["schemas"]["ResourceSpec"];
            /**
             * @description The learning rate schedule.
             * @default {
             *       "args": {},
             *       "factory": "constant"
             *     }
             */
            schedule: components["schemas"]["Factory"];
            /** @description Steps, batch sizes, precision and evaluation. */
            train?: components["schemas"]["TrainSpec"];
            /** @description A subclass of meshloom.Trainable; it builds the model and computes a step. */
            trainable?: components["schemas"]["Factory"] | null;
        };
        /**
         * JobState
         * @description The state of a job (the transitions are in ``services.controller.domain.job.lifecycle``).
         * @enum {string}
         */
        JobState: "QUEUED" | "PLACING" | "STARTING" | "RUNNING" | "PAUSING" | "PAUSED" | "RESTARTING" | "CANCELLING" | "CANCELLED" | "SUCCEEDED" | "FAILED";
        /**
         * JobView
         * @description A job: its spec, its state and the reason for it, and its progress.
         */
        JobView: {
            /**
             * Attempt
             * @description number of the newest attempt, its fence; 0 before
             * @default 0
             */
            attempt: number;
            cloned_from: components["schemas"]["CloneOrigin"] | null;
            /**
             * Created At
             * Format: date-time
             */
            created_at: string;
            /** Ended At */
            ended_at: string | null;
            /** @description what its plan estimated, and what was measured; null without a plan_id */
            estimate: components["schemas"]["EstimateView"] | null;
            evaluation: components["schemas"]["Evaluation"] | null;
            exit_reason: components["schemas"]["ExitReason"] | null;
            failure: components["schemas"]["FailureView"] | null;
            /** Id */
            id: string;
            /**
             * Labels
             * @default {}
             */
            labels: {
                [key: string]: string;
            };
            /** Latest Checkpoint */
            latest_checkpoint: string | null;
            /** Name */
            name: string;
            /**
             * Owner
             * @default local
             */
            owner: string;
            plan: components["schemas"]["GangPlan"] | null;
            /**
             * Priority
             * @default 0
             */
            priority: number;
            progress: components["schemas"]["Progress"];
            /**
             * Reason
             * @description why it is in this state
             */
            reason: string | null;
            /** @description those of the newest attempt, if it continues without lost ones */
            replicas: components["schemas"]["ReplicasView"] | null;
            /**
             * Restarts
             * @default 0
             */
            restarts: number;
            /**
             * Revision
             * @description how often people changed it; the ETag begins with it
             * @default 0
             */
            revision: number;
            spec: components["schemas"]["JobSpec"];
            /** Started At */
            started_at: string | null;
            state: components["schemas"]["JobState"];
            /**
             * Telemetry Away
             * @description whether the Redis for telemetry does not answer, or nothing of ranks that train has come there for half a minute, as from agents that write to another one: progress is then what the job's record has
             * @default false
             */
            telemetry_away: boolean;
            /**
             * Updated At
             * Format: date-time
             */
            updated_at: string;
            /** @description the bounds of an elastic job */
            world: components["schemas"]["WorldSpec"] | null;
            /**
             * World Size
             * @description ranks of the newest attempt; before the first one, how many it needs
             * @default 1
             */
            world_size: number;
        };
        JsonValue: unknown;
        /**
         * KeepBestSpec
         * @description Retention also keeps the ``count`` best checkpoints, by the evaluation at their step.
         */
        KeepBestSpec: {
            /**
             * Count
             * @description How many of the best checkpoints to keep.
             * @default 1
             */
            count: number;
            /**
             * Metric
             * @description The validation metric that decides; loss is the validation loss.
             * @default loss
             */
            metric: string;
            /**
             * Mode
             * @description min: lower is better; max: higher is better.
             * @default min
             * @enum {string}
             */
            mode: "min" | "max";
        };
        /**
         * LogPage
         * @description Log lines, oldest first.
         */
        LogPage: {
            /** Items */
            items: components["schemas"]["LogView"][];
            /** Next Cursor */
            next_cursor: string | null;
        };
        /**
         * LogView
         * @description A line of output. ``id`` resumes a stream (``Last-Event-ID``).
         */
        LogView: {
            /** Fence */
            fence: number;
            /** Id */
            id: string;
            /**
             * Level
             * @default info
             * @enum {string}
             */
            level: "debug" | "info" | "warning" | "error";
            /** Rank */
            rank: number;
            /**
             * Stream
             * @enum {string}
             */
            stream: "stdout" | "stderr";
            /** Text */
            text: string;
            /** Time Ms */
            time_ms: number;
        };
        /**
         * MeasuredView
         * @description The figures that a node last measured of its devices, or why there are none.
         */
        MeasuredView: {
            facts: components["schemas"]["NodeFacts"] | null;
            /** Failure */
            failure: string | null;
            /**
             * Measured At
             * Format: date-time
             */
            measured_at: string;
        };
        /**
         * MemoryView
         * @description Bytes of device memory at one moment, by what they are for.
         *
         *     ``parameters``: slices, padded. ``unsharded``: whole parameters. ``whole_gradients``: as autograd
         *     makes them, until they are reduced. ``communication``: what is being gathered or reduced, and
         *     what of memory that ranks share is this rank's, but for its slices.
         *     ``workspace``: what operators take within themselves.
         */
        MemoryView: {
            /**
             * Activations
             * @default 0
             */
            activations: number;
            /**
             * Buffers
             * @default 0
             */
            buffers: number;
            /**
             * Communication
             * @default 0
             */
            communication: number;
            /**
             * Gradients
             * @default 0
             */
            gradients: number;
            /**
             * Optimizer
             * @default 0
             */
            optimizer: number;
            /**
             * Parameters
             * @default 0
             */
            parameters: number;
            /**
             * Total
             * @default 0
             */
            total: number;
            /**
             * Unsharded
             * @default 0
             */
            unsharded: number;
            /**
             * Whole Gradients
             * @default 0
             */
            whole_gradients: number;
            /**
             * Workspace
             * @default 0
             */
            workspace: number;
        };
        /**
         * MeshPlan
         * @description Ranks along each mesh axis, each at least 1.
         *
         *     Attributes:
         *         dp_replicate: Copies of the sharded model.
         *         dp_shard: Ranks that share one copy's parameters.
         *         tp: Ranks that share one matrix multiplication.
         */
        MeshPlan: {
            /**
             * Dp Replicate
             * @default 1
             */
            dp_replicate: number;
            /**
             * Dp Shard
             * @default 1
             */
            dp_shard: number;
            /**
             * Tp
             * @default 1
             */
            tp: number;
        };
        /**
         * MeshSpec
         * @description Sizes of the mesh axes; their product is the number of ranks.
         *
         *     Of an elastic job ``dp_replicate`` is left out: it grows and shrinks with the number of ranks.
         */
        MeshSpec: {
            /**
             * Dp Replicate
             * @description Copies of the sharded model (HSDP); leave it out of an elastic job.
             * @default 1
             */
            dp_replicate: number;
            /**
             * Dp Shard
             * @description Ranks over which one copy is sharded.
             * @default 1
             */
            dp_shard: number;
            /**
             * Tp
             * @description Ranks over which single matrices are split (tensor parallelism).
             * @default 1
             */
            tp: number;
        };
        /**
         * MetricPoint
         * @description A user metric at a step; names of validation begin with ``validation/``.
         */
        MetricPoint: {
            /** Fence */
            fence: number;
            /** Step */
            step: number;
            /** Values */
            values: {
                [key: string]: number | null;
            };
        };
        /**
         * MetricsPart
         * @description The same with only the requested metrics, beside ``step`` and ``fence``.
         */
        MetricsPart: {
            /**
             * Evaluations
             * @default []
             */
            evaluations: components["schemas"]["Evaluation"][];
            /** Items */
            items: {
                [key: string]: number | null;
            }[];
            /**
             * Loss Unit
             * @description nats a token, or empty where the loss has no known unit
             * @default nats
             * @enum {string}
             */
            loss_unit: "nats" | "";
            /**
             * Names
             * @description the user's metrics, at most 64; request each by `name`
             * @default []
             */
            names: string[];
            /**
             * Names Left Out
             * @description further names, which are not kept
             * @default 0
             */
            names_left_out: number;
            /**
             * Throughput Unit
             * @description what `tokens_per_s` counts
             * @default tokens
             * @enum {string}
             */
            throughput_unit: "tokens" | "samples";
            /**
             * Total
             * @description records in the range before downsampling
             */
            total: number;
        };
        /**
         * MetricsSpec
         * @description Where metrics are sent in addition to the API, JSON lines and TensorBoard's event files.
         */
        MetricsSpec: {
            /** @description MLflow. */
            mlflow?: components["schemas"]["MlflowSpec"] | null;
            /** @description Weights & Biases. */
            wandb?: components["schemas"]["WandbSpec"] | null;
        };
        /**
         * MetricsView
         * @description Training steps, oldest first, at most ``max_points`` of them, the first and last kept.
         *
         *     ``user_metrics``: as many points of the user's metrics.
         */
        MetricsView: {
            /**
             * Evaluations
             * @default []
             */
            evaluations: components["schemas"]["Evaluation"][];
            /** Items */
            items: components["schemas"]["StepView"][];
            /**
             * Loss Unit
             * @description nats a token, or empty where the loss has no known unit
             * @default nats
             * @enum {string}
             */
            loss_unit: "nats" | "";
            /**
             * Names
             * @description the user's metrics, at most 64; request each by `name`
             * @default []
             */
            names: string[];
            /**
             * Names Left Out
             * @description further names, which are not kept
             * @default 0
             */
            names_left_out: number;
            /**
             * Throughput Unit
             * @description what `tokens_per_s` counts
             * @default tokens
             * @enum {string}
             */
            throughput_unit: "tokens" | "samples";
            /**
             * Total
             * @description records in the range before downsampling
             */
            total: number;
            /**
             * User Metrics
             * @default []
             */
            user_metrics: components["schemas"]["MetricPoint"][];
        };
        /**
         * MlflowSpec
         * @description Sends the metrics to MLflow too; nodes need ``meshloom[mlflow]``.
         *
         *     Each attempt is a run of the experiment, the job's name unless another is given. Without a
         *     ``tracking_uri`` it writes into the folder ``mlruns`` beside the logs, which programs of MLflow
         *     read where ``MLFLOW_ALLOW_FILE_STORE=true`` is set.
         */
        MlflowSpec: {
            /**
             * Experiment
             * @description The experiment's name; null: the job's name.
             */
            experiment?: string | null;
            /** @description That user's password. */
            password?: components["schemas"]["SecretReference"] | null;
            /** @description The server's bearer token. */
            token?: components["schemas"]["SecretReference"] | null;
            /**
             * Tracking Uri
             * @description The tracking server; null: the folder mlruns beside the job's logs.
             */
            tracking_uri?: string | null;
            /** @description The server's user. */
            username?: components["schemas"]["SecretReference"] | null;
        };
        /**
         * NodeCapacity
         * @description The slots of one node. Nothing is free on a node that takes no gangs now.
         */
        NodeCapacity: {
            /** Accelerators */
            accelerators: number;
            /** Accelerators Free */
            accelerators_free: number;
            /** Cpu Slots */
            cpu_slots: number;
            /** Cpu Slots Free */
            cpu_slots_free: number;
            /** Node Id */
            node_id: string;
            state: components["schemas"]["NodeState"];
        };
        /**
         * NodeFacts
         * @description What a node's self-test measured: for each rank, while the others work too.
         *
         *     Attributes:
         *         matmul_flops: Floating-point operations a second of large matrix products, by dtype word.
         *         memory_bandwidth: Bytes a second of its memory.
         *         link_bandwidth: Bytes a second that a rank sends to another one of the node.
         *         network_bandwidth: Bytes a second that it sends to other nodes.
         *         collective_latency: Seconds that a collective takes at least.
         *         ranks: Ranks that the node seats.
         *         overlap: Part of communication, 0 to 1, that computation can hide.
         *         dispatch_s: Seconds that the host takes to launch an operator.
         *         exchanges: By kind of collective; a kind that is missing goes at `link_bandwidth`.
         *         shared_exchanges: The same through memory that ranks of the node share, where they do; what is
         *             missing is taken from `exchanges`.
         *         unit_s: Seconds of the engine in a pass for each unit, without collectives.
         *         parameter_s: The same for each parameter.
         *         sharded_parameter_s: The same where there are several ranks along dp_shard.
         *         update_s: Seconds of a step for each parameter that is clipped and updated.
         *         norm_s: Seconds of a step until ranks along dp_shard know the norm of all gradients.
         *         scale: By which all seconds are multiplied: what steps were seen to take longer.
         */
        NodeFacts: {
            /** Collective Latency */
            collective_latency: number;
            /**
             * Dispatch S
             * @default 0
             */
            dispatch_s: number;
            /** Exchanges */
            exchanges: {
                [key: string]: components["schemas"]["Exchange"];
            };
            /** Link Bandwidth */
            link_bandwidth: number;
            /** Matmul Flops */
            matmul_flops: {
                [key: string]: number;
            };
            /** Memory Bandwidth */
            memory_bandwidth: number;
            /** Network Bandwidth */
            network_bandwidth: number;
            /**
             * Norm S
             * @default 0
             */
            norm_s: number;
            /**
             * Overlap
             * @default 0.9
             */
            overlap: number;
            /**
             * Parameter S
             * @default 0
             */
            parameter_s: number;
            /** Ranks */
            ranks: number;
            /**
             * Scale
             * @default 1
             */
            scale: number;
            /**
             * Sharded Parameter S
             * @default 0
             */
            sharded_parameter_s: number;
            /** Shared Exchanges */
            shared_exchanges: {
                [key: string]: {
                    [key: string]: components["schemas"]["Exchange"];
                };
            };
            /**
             * Unit S
             * @default 0
             */
            unit_s: number;
            /**
             * Update S
             * @default 0
             */
            update_s: number;
        };
        /**
         * NodeList
         * @description A page of the known nodes, by name.
         */
        NodeList: {
            /** Items */
            items: components["schemas"]["NodeView"][];
            /** Next Cursor */
            next_cursor: string | null;
        };
        /**
         * NodeState
         * @description The state of a node: whether its lease is renewed.
         * @enum {string}
         */
        NodeState: "READY" | "DRAINING" | "LOST";
        /**
         * NodeView
         * @description A node: its resources, whether its lease is valid, the ranks that it runs.
         *
         *     ``measured``, by type of device, is known once a plan has asked for it.
         */
        NodeView: {
            /**
             * Accelerators Used
             * @default 0
             */
            accelerators_used: number;
            /**
             * Cpu Slots Used
             * @default 0
             */
            cpu_slots_used: number;
            /** Id */
            id: string;
            inventory: components["schemas"]["Inventory"];
            /**
             * Jobs
             * @default []
             */
            jobs: string[];
            /**
             * Joined At
             * Format: date-time
             */
            joined_at: string;
            /**
             * Lease S
             * @description seconds until the lease expires
             */
            lease_s: number | null;
            /**
             * Measured
             * @default {}
             */
            measured: {
                [key: string]: components["schemas"]["MeasuredView"];
            };
            state: components["schemas"]["NodeState"];
        };
        /**
         * OptimizerSpec
         * @description An optimizer, and options for some of the parameters.
         */
        OptimizerSpec: {
            /**
             * Args
             * @description Keyword arguments of the callable.
             */
            args?: {
                [key: string]: components["schemas"]["JsonValue"];
            };
            /**
             * Factory
             * @description A built-in's short name, or module:callable of your code.
             */
            factory: string;
            /**
             * Groups
             * @description Different options for some parameters; the first group that matches applies.
             * @default []
             */
            groups: components["schemas"]["ParameterGroup"][];
        };
        /**
         * ParameterGroup
         * @description Options of the optimizer for the parameters whose names ``match``, such as ``weight_decay``.
         *
         *     ``match`` is a pattern in which ``*`` stands for any characters, dots too; a parameter belongs to
         *     the first group that matches it, and to the optimizer's own groups if none does.
         */
        ParameterGroup: {
            /**
             * Match
             * @description Pattern of parameter names; * matches any characters, dots included.
             */
            match: string;
        } & {
            [key: string]: components["schemas"]["JsonValue"];
        };
        /**
         * PlanAlternative
         * @description Another plan that was considered, and why it lost.
         */
        PlanAlternative: {
            /** Fits */
            fits: boolean;
            /** Lost Because */
            lost_because: string;
            mesh: components["schemas"]["MeshPlan"];
            /** Micro Batch */
            micro_batch: number;
            /** Peak Bytes */
            peak_bytes: number | null;
            /** Step Time S */
            step_time_s: number | null;
            /** Title */
            title: string;
        };
        /**
         * PlanFailure
         * @description Why there is no plan: a code for programs, the reason, and what to do.
         */
        PlanFailure: {
            /** Advice */
            advice: string;
            /**
             * Code
             * @enum {string}
             */
            code: "timed_out" | "out_of_memory" | "crashed" | "refused" | "raised" | "wrong_spec" | "no_answer" | "search_failed";
            /** Reason */
            reason: string;
            /** Traceback */
            traceback: string | null;
        };
        /**
         * PlanList
         * @description A page of the plans of the last seven days, newest first.
         */
        PlanList: {
            /** Items */
            items: components["schemas"]["PlanSummary"][];
            /** Next Cursor */
            next_cursor: string | null;
        };
        /**
         * PlanProbe
         * @description Where the model was profiled. ``cached``: the profile of an earlier plan was used.
         */
        PlanProbe: {
            /** Cached */
            cached: boolean;
            /** Id */
            id: string;
            /** Node Id */
            node_id: string;
            /** Took S */
            took_s: number | null;
        };
        /**
         * PlanState
         * @description The state of a plan: its model is profiled; it is ready (feasible or not); or it failed.
         * @enum {string}
         */
        PlanState: "PROBING" | "READY" | "FAILED";
        /**
         * PlanSummary
         * @description A plan in a list. ``peak_bytes``: what its fullest rank needs; ``ranks``: how many.
         */
        PlanSummary: {
            /**
             * Created At
             * Format: date-time
             */
            created_at: string;
            /** Device Type */
            device_type: ("cpu" | "cuda") | null;
            /**
             * Expires At
             * Format: date-time
             */
            expires_at: string;
            /** Feasible */
            feasible: boolean | null;
            /** Id */
            id: string;
            /** Memory Limit Bytes */
            memory_limit_bytes: number | null;
            mesh: components["schemas"]["MeshPlan"] | null;
            /** Micro Batch */
            micro_batch: number | null;
            /** Name */
            name: string;
            /** Owner */
            owner: string;
            /** Peak Bytes */
            peak_bytes: number | null;
            /** Ranks */
            ranks: number;
            /** Reason */
            reason: string;
            state: components["schemas"]["PlanState"];
            /** Step Time S */
            step_time_s: number | null;
        };
        /**
         * PlanUnit
         * @description One unit: its modules, and how they are sharded, gathered and computed.
         *
         *     ``parameters`` are counted whole, ``rank_bytes`` is what the fullest rank keeps of them.
         *     ``shared_memory``: how ranks of one host gather: by copies from memory that they share, or with
         *     one copy of the parameters for all (``storage``). null: through their process group.
         */
        PlanUnit: {
            /**
             * Compile
             * @default false
             */
            compile: boolean;
            /** Modules */
            modules: string[];
            /**
             * Offload
             * @default false
             */
            offload: boolean;
            /** Param Dtype */
            param_dtype: string | null;
            /** Parameters */
            parameters: number;
            /** Prefetch */
            prefetch: number | null;
            /** Rank Bytes */
            rank_bytes: number;
            /**
             * Recompute
             * @default false
             */
            recompute: boolean;
            /** Reduce Dtype */
            reduce_dtype: string | null;
            /** Reshard After Forward */
            reshard_after_forward: boolean | number;
            /** Shared Memory */
            shared_memory: ("copy" | "storage") | null;
        };
        /**
         * PlanView
         * @description A plan: its state, and its result once the model is profiled.
         */
        PlanView: {
            /**
             * Accumulation
             * @description forwards and backwards of a step
             */
            accumulation: number | null;
            /**
             * Advice
             * @default []
             */
            advice: string[];
            /**
             * Alternatives
             * @default []
             */
            alternatives: components["schemas"]["PlanAlternative"][];
            /**
             * Created At
             * Format: date-time
             */
            created_at: string;
            /** Device Type */
            device_type: ("cpu" | "cuda") | null;
            /**
             * Expires At
             * Format: date-time
             */
            expires_at: string;
            failure: components["schemas"]["PlanFailure"] | null;
            /** Feasible */
            feasible: boolean | null;
            /** Id */
            id: string;
            /**
             * Memory
             * @default []
             */
            memory: components["schemas"]["RankMemory"][];
            /** Memory Limit Bytes */
            memory_limit_bytes: number | null;
            /** Memory Reserve Bytes */
            memory_reserve_bytes: number | null;
            mesh: components["schemas"]["MeshPlan"] | null;
            /** Micro Batch */
            micro_batch: number | null;
            /**
             * Model Flops
             * @description floating-point operations of a step over all ranks, none counted twice
             */
            model_flops: number | null;
            /** Owner */
            owner: string;
            /**
             * Peak Flops
             * @description of a rank's device in a second, measured by large matrix products
             */
            peak_flops: number | null;
            /** Placement */
            placement: string | null;
            probe: components["schemas"]["PlanProbe"];
            /**
             * Ranks
             * @default []
             */
            ranks: components["schemas"]["RankPlacement"][];
            /** Reason */
            reason: string;
            /**
             * Reasons
             * @default []
             */
            reasons: string[];
            sharding: components["schemas"]["ShardingPlan"] | null;
            spec: components["schemas"]["JobSpec"];
            state: components["schemas"]["PlanState"];
            step_time: components["schemas"]["StepTimeView"] | null;
            /**
             * Traffic
             * @default []
             */
            traffic: components["schemas"]["AxisTraffic"][];
            /**
             * Units
             * @default []
             */
            units: components["schemas"]["PlanUnit"][];
        };
        /**
         * PoolKind
         * @description What brings the nodes of a pool.
         * @enum {string}
         */
        PoolKind: "slurm" | "ray" | "kubernetes";
        /**
         * PoolList
         * @description All pools, in the order in which they are asked.
         */
        PoolList: {
            /** Items */
            items: components["schemas"]["PoolView"][];
        };
        /**
         * PoolView
         * @description A pool: what it may have at a time, and what it has.
         */
        PoolView: {
            /**
             * Accelerators
             * @description of each node
             */
            accelerators: number;
            /**
             * Cpu Slots
             * @description of each node
             */
            cpu_slots: number;
            /**
             * Ended
             * @description the newest that were given back (RELEASED) or lost (LOST), the last one first
             * @default []
             */
            ended: components["schemas"]["ReservationView"][];
            /** Idle Timeout S */
            idle_timeout_s: number;
            kind: components["schemas"]["PoolKind"];
            /** Max Nodes */
            max_nodes: number;
            /** Name */
            name: string;
            /** Ready Timeout S */
            ready_timeout_s: number;
            /** Reservations */
            reservations: components["schemas"]["ReservationView"][];
            /**
             * Trouble
             * @description why it does not answer; null: it does, or this controller does not lead
             */
            trouble: string | null;
        };
        /**
         * PrecisionSpec
         * @description Element types: of the gathered parameters and of the gradient reduction.
         *
         *     With fp16 anywhere in them or in the plan, losses are scaled so that gradients do not underflow.
         */
        PrecisionSpec: {
            /**
             * Params
             * @description Element type of gathered parameters and of the computation.
             * @default fp32
             * @enum {string}
             */
            params: "fp32" | "bf16" | "fp16";
            /**
             * Reduce
             * @description Element type in which gradients are reduced.
             * @default fp32
             * @enum {string}
             */
            reduce: "fp32" | "bf16" | "fp16";
        };
        /**
         * Problem
         * @description The body of every error answer. Clients branch on ``code``, people read ``detail``.
         */
        Problem: {
            /** Code */
            code: string;
            /** Detail */
            detail: string;
            /**
             * Errors
             * @default []
             */
            errors: components["schemas"]["Fault"][];
            /** Instance */
            instance: string | null;
            /** Request Id */
            request_id: string | null;
            /** Status */
            status: number;
            /** Title */
            title: string;
            /** Type */
            type: string;
        };
        /**
         * Progress
         * @description How far a job is. ``eta_s`` from the median of the last step times.
         *
         *     ``of`` is null as long as a script has not told how many steps it makes.
         *     ``tokens_per_s`` counts what ``throughput_unit`` says; the losses of the job, validation's too,
         *     are in ``loss_unit``: nats a token, or none that is known. ``metrics``: the newest values of the user's
         *     metrics, by name. ``mfu``: model FLOPs utilisation of the newest step, from 0 to 1.
         */
        Progress: {
            /** Eta S */
            eta_s: number | null;
            /** Loss */
            loss: number | null;
            /**
             * Loss Unit
             * @default nats
             * @enum {string}
             */
            loss_unit: "nats" | "";
            /**
             * Metrics
             * @default {}
             */
            metrics: {
                [key: string]: number | null;
            };
            /** Mfu */
            mfu: number | null;
            /** Of */
            of: number | null;
            /**
             * Step
             * @default 0
             */
            step: number;
            /** Step Time S */
            step_time_s: number | null;
            /**
             * Throughput Unit
             * @default tokens
             * @enum {string}
             */
            throughput_unit: "tokens" | "samples";
            /** Tokens Per S */
            tokens_per_s: number | null;
        };
        /**
         * QueueEntry
         * @description A job that waits for slots. ``position`` counts from 1.
         */
        QueueEntry: {
            /**
             * Blocked By
             * @default []
             */
            blocked_by: string[];
            /**
             * Device
             * @enum {string}
             */
            device: "auto" | "cpu" | "cuda";
            /**
             * Expected Start At
             * @description by the speed of the jobs ahead of it so far; null: unknown
             */
            expected_start_at: string | null;
            /** Job Id */
            job_id: string;
            /** Name */
            name: string;
            /** Position */
            position: number;
            /** Priority */
            priority: number;
            /**
             * Ranks
             * @description how many it needs; of an elastic job, the fewest
             */
            ranks: number;
            /**
             * Reason
             * @description why it waits
             */
            reason: string;
            state: components["schemas"]["JobState"];
            /**
             * Waiting Since
             * Format: date-time
             */
            waiting_since: string;
            /** @description the bounds of an elastic job */
            world: components["schemas"]["WorldSpec"] | null;
        };
        /**
         * QueueView
         * @description All jobs that wait for slots, the next one first.
         */
        QueueView: {
            /** Items */
            items: components["schemas"]["QueueEntry"][];
        };
        /**
         * RankList
         * @description All ranks of the newest attempt, by number. ``throughput_unit``: what ``tokens_per_s`` counts.
         */
        RankList: {
            /** Attempt */
            attempt: number;
            /** Items */
            items: components["schemas"]["RankView"][];
            /**
             * Throughput Unit
             * @default tokens
             * @enum {string}
             */
            throughput_unit: "tokens" | "samples";
        };
        /**
         * RankMemory
         * @description What each of ``ranks`` will need: at its peak, and between two steps.
         *
         *     ``where`` and ``unit`` say in which phase of the step the peak is and which unit is at work
         *     there ("": the root, or none). Beyond 16 ranks along dp_shard the fullest speaks for all.
         */
        RankMemory: {
            /**
             * Host Bytes
             * @description of the host, for what is offloaded
             * @default 0
             */
            host_bytes: number;
            peak: components["schemas"]["MemoryView"];
            /** Ranks */
            ranks: number[];
            resting: components["schemas"]["MemoryView"];
            /** Unit */
            unit: string;
            /** Where */
            where: string;
        };
        /**
         * RankPlacement
         * @description Where a rank runs: a node, its local rank there, its device (``cpu`` or ``cuda:<index>``).
         */
        RankPlacement: {
            /** Device */
            device: string;
            /** Local Rank */
            local_rank: number;
            /** Node Id */
            node_id: string;
            /** Rank */
            rank: number;
        };
        /**
         * RankStacks
         * @description The Python stacks of all threads of a rank, when it was last inspected.
         *
         *     Empty where it did not answer.
         */
        RankStacks: {
            /** Fence */
            fence: number;
            /** Node Id */
            node_id: string;
            /** Rank */
            rank: number;
            /** Text */
            text: string;
        };
        /**
         * RankView
         * @description One rank of the newest attempt, from its board. Memory in bytes, times in seconds.
         */
        RankView: {
            /**
             * Arrival Lag S
             * @description how much later than the first rank it issues a collective, on average
             */
            arrival_lag_s: number | null;
            /** Beat Age S */
            beat_age_s: number | null;
            /**
             * Collectives Behind
             * @description behind the foremost rank of its groups
             * @default 0
             */
            collectives_behind: number;
            /**
             * Completed
             * @default {}
             */
            completed: {
                [key: string]: number;
            };
            /**
             * Data Wait S
             * @description of step_time_s, what the rank waited for its data
             */
            data_wait_s: number | null;
            /** Device */
            device: string;
            /**
             * Fragments Bytes
             * @description on GPUs what PyTorch's allocator held over that, as fragments
             */
            fragments_bytes: number | null;
            /**
             * Is Straggler
             * @description the job is RUNNING, and this rank costs it 10 % of the step or more: its score is the highest, and that far above the median of the other ranks
             * @default false
             */
            is_straggler: boolean;
            /**
             * Issued
             * @default {}
             */
            issued: {
                [key: string]: number;
            };
            /** Last Seen At */
            last_seen_at: string | null;
            /** Local Rank */
            local_rank: number;
            /** Loss */
            loss: number | null;
            /**
             * Memory Bytes
             * @description after the last step: on CPUs all that is resident of the process, on GPUs the most that PyTorch's allocator had given out
             * @default 0
             */
            memory_bytes: number;
            /** Node Id */
            node_id: string;
            /**
             * Peak Bytes
             * @description the most that its steps took, without the process itself
             */
            peak_bytes: number | null;
            /** Phase */
            phase: string;
            /** Pid */
            pid: number | null;
            /** Rank */
            rank: number;
            /**
             * Step
             * @default 0
             */
            step: number;
            /** Step Time S */
            step_time_s: number | null;
            /**
             * Straggler Score
             * @description share of the time in which it was late at a collective that most ranks had issued
             */
            straggler_score: number | null;
            /** Tokens Per S */
            tokens_per_s: number | null;
            /** Unit */
            unit: string | null;
        };
        /**
         * ReplicasView
         * @description The replicas of an attempt that continues without lost ones.
         */
        ReplicasView: {
            /**
             * Count
             * @description how many the mesh has
             */
            count: number;
            /**
             * Lost
             * @description how often one was lost
             */
            lost: number;
            /**
             * Present
             * @description how many take part now; 0 until all have begun
             */
            present: number;
            /**
             * Returned
             * @description how often one came back
             */
            returned: number;
        };
        /**
         * ReservationState
         * @description What is wanted of nodes of a pool, and how far that is.
         *
         *     REQUESTED: the pool is to be asked. PROVISIONING: it was asked; not all nodes have joined. READY: all
         *     have. RELEASING: they are to be given back. RELEASED: they were. LOST: so were they, after the pool had
         *     taken them back, or one of them was lost.
         * @enum {string}
         */
        ReservationState: "REQUESTED" | "PROVISIONING" | "READY" | "RELEASING" | "RELEASED" | "LOST";
        /**
         * ReservationView
         * @description Nodes that a pool was asked for, all or none of them.
         */
        ReservationView: {
            /**
             * Ended At
             * @description when its nodes were gone
             */
            ended_at: string | null;
            /** Id */
            id: string;
            /**
             * Job Id
             * @description for which it was made; null: found at the pool
             */
            job_id: string | null;
            /** Node Ids */
            node_ids: string[];
            /**
             * Ready At
             * @description when all nodes had joined
             */
            ready_at: string | null;
            /**
             * Reason
             * @description what the pool said last, or why it is given back or was lost, with the pool's words
             */
            reason: string;
            /**
             * Requested At
             * Format: date-time
             */
            requested_at: string;
            state: components["schemas"]["ReservationState"];
        };
        /**
         * ResourcesPatch
         * @description The bounds of an elastic job.
         */
        ResourcesPatch: {
            /** @default {} */
            world: components["schemas"]["BoundsPatch"];
        };
        /**
         * ResourceSpec
         * @description How many ranks, on what kind of device (``auto``: GPUs where a node has them).
         *
         *     Either ``ranks``, a fixed number, or ``world``, the bounds of an elastic job, of which ``ranks``
         *     then is the lower one. As JSON there is only the one that was given.
         */
        ResourceSpec: {
            /**
             * Device
             * @description auto: GPUs where a node has them, else CPUs.
             * @default auto
             * @enum {string}
             */
            device: "auto" | "cpu" | "cuda";
            /**
             * Memory Gib
             * @description Host memory that a rank may take, in GiB; allocations beyond it fail. null: no limit.
             */
            memory_gib?: number | null;
            /**
             * Ranks
             * @description A fixed number of ranks; give either ranks or world.
             * @default 1
             */
            ranks: number;
            /** @description Bounds of an elastic job, which shrinks and grows between them. */
            world?: components["schemas"]["WorldSpec"] | null;
        };
        /**
         * ResumeRequest
         * @description From where to resume: a checkpoint of the job, or its latest committed one.
         */
        ResumeRequest: {
            /** From Checkpoint */
            from_checkpoint?: string | null;
        };
        /**
         * RetentionPatch
         * @description How many committed checkpoints are kept; null: the default.
         *
         *     ``keep_best``: beside these the best ones, null: none. It holds for what is committed from now on,
         *     and for what has an evaluation already. Ranks that run go on evaluating as they did: where they did
         *     not before each checkpoint, they do so from the next attempt on.
         */
        RetentionPatch: {
            keep_best?: components["schemas"]["BestPatch"] | null;
            /** Keep Last */
            keep_last?: number | null;
        };
        /**
         * Scope
         * @description The rights of a token. Each of the first three includes those before it.
         * @enum {string}
         */
        Scope: "viewer" | "submitter" | "operator" | "agent";
        /**
         * SecretReference
         * @description A secret by name: its value is in a file on the nodes.
         */
        SecretReference: {
            /**
             * Secret
             * @description The name of a file in the nodes' MESHLOOM_SECRETS_DIR.
             */
            secret: string;
        };
        /**
         * ShardDim
         * @description A parameter of a unit and the dim along which it is sharded.
         *
         *     Attributes:
         *         parameter: Its name below the unit's module, segments joined by dots; a segment may be
         *             ``*``.
         *         dim: From 0; negative counts from the end.
         */
        ShardDim: {
            /** Dim */
            dim: number;
            /** Parameter */
            parameter: string;
        };
        /**
         * ShardingPlan
         * @description How a model is sharded.
         *
         *     The root is always a unit, the last one, whether or not `units` names it; naming it ("")
         *     sets its options. Units may be given in any order; they are applied bottom-up.
         *
         *     Attributes:
         *         mesh: Ranks per axis.
         *         units: Modules that communicate together, besides the root.
         *         param_dtype: Of computation and gathers; None means each parameter's own.
         *         reduce_dtype: Of gradient reduction; None means `param_dtype`.
         *         output_dtype: To which the root's floating-point outputs are cast; None leaves them.
         *         tensor_parallel: What is split over the `tp` axis; everything else is whole on each of
         *             its ranks.
         *         shared_memory: How CPU ranks of one host exchange what `dp_shard` gathers and reduces.
         *             ``none``: through their process group. ``copy``: through memory that all map, from which
         *             each copies whole parameters. ``storage``: the same, and all compute with one copy of
         *             the parameters. ``auto``: ``storage`` for units of which nothing is cast and whose forward
         *             writes no parameter, as far as that is known; else ``copy``. On accelerators it changes
         *             nothing.
         *         version: Of this schema.
         */
        ShardingPlan: {
            mesh: components["schemas"]["MeshPlan"];
            /** Output Dtype */
            output_dtype?: ("fp64" | "fp32" | "bf16" | "fp16") | null;
            /** Param Dtype */
            param_dtype?: ("fp64" | "fp32" | "bf16" | "fp16") | null;
            /** Reduce Dtype */
            reduce_dtype?: ("fp64" | "fp32" | "bf16" | "fp16") | null;
            /**
             * Shared Memory
             * @default none
             * @enum {string}
             */
            shared_memory: "auto" | "none" | "copy" | "storage";
            /**
             * Tensor Parallel
             * @default []
             */
            tensor_parallel: components["schemas"]["TensorParallelPlan"][];
            /**
             * Units
             * @default []
             */
            units: components["schemas"]["UnitPlan"][];
            /**
             * Version
             * @default 1
             */
            version: number;
        };
        /**
         * ShardView
         * @description One rank's file of a checkpoint.
         */
        ShardView: {
            /** Bytes */
            bytes: number;
            /** Name */
            name: string;
            /** Rank */
            rank: number;
            /** Sha256 */
            sha256: string;
        };
        /**
         * SparseJobPage
         * @description A page of jobs with only the requested fields, and ``id``.
         */
        SparseJobPage: {
            /** Items */
            items: {
                [key: string]: unknown;
            }[];
            /** Next Cursor */
            next_cursor: string | null;
        };
        /**
         * StepTimeView
         * @description Seconds of a step, estimated from the node's figures; without overlap in ``total_s``.
         *
         *     ``scale``: what the first steps of earlier jobs of the model took, over what was estimated for
         *     them; all seconds are multiplied by it. ``tokens_per_s`` counts what ``throughput_unit`` says.
         */
        StepTimeView: {
            /** Compute S */
            compute_s: number;
            /** Optimizer S */
            optimizer_s: number;
            /**
             * Scale
             * @default 1
             */
            scale: number;
            /**
             * Throughput Unit
             * @default tokens
             * @enum {string}
             */
            throughput_unit: "tokens" | "samples";
            /** Tokens Per S */
            tokens_per_s: number;
            /** Total S */
            total_s: number;
        };
        /**
         * StepView
         * @description A training step.
         *
         *     ``mfu``: model FLOPs utilisation, from 0 to 1: the floating-point operations that forward and
         *     backward of the model need, none computed again counted, over those that its devices could have
         *     made in the step's time (PaLM, arXiv:2204.02311, appendix B). The operations are those of the
         *     model's profile, the devices' peak is measured by large matrix products. None where either is not
         *     known.
         */
        StepView: {
            /**
             * Data Wait S
             * @description of step_time_s, what rank 0 waited for its data
             */
            data_wait_s: number | null;
            /** Fence */
            fence: number;
            /** Grad Norm */
            grad_norm: number | null;
            /** Learning Rate */
            learning_rate: number | null;
            /** Loss */
            loss: number | null;
            /**
             * Memory Bytes
             * @description the most that a rank on the node of rank 0 held after the step, as of a sample
             */
            memory_bytes: number | null;
            /** Mfu */
            mfu: number | null;
            /**
             * Of
             * @description how many steps there will be, as the job's script says
             */
            of: number | null;
            /** Step */
            step: number;
            /** Step Time S */
            step_time_s: number;
            /**
             * Time Ms
             * @description when rank 0 ended the step, by the clock of its node
             */
            time_ms: number | null;
            /** Tokens Per S */
            tokens_per_s: number;
        };
        /**
         * StopRequest
         * @description How to stop: the body of pause and cancel.
         */
        StopRequest: {
            /**
             * Checkpoint
             * @default best_effort
             * @enum {string}
             */
            checkpoint: "required" | "best_effort" | "none";
            /**
             * Grace S
             * @default 60
             */
            grace_s: number;
        };
        /**
         * TensorParallelPlan
         * @description Linear and embedding modules whose weights are split over the `tp` axis.
         *
         *     Attributes:
         *         modules: Patterns as of a unit; each match is split by itself.
         *         style: ``colwise`` splits what comes out: each rank computes its part of the outputs from
         *             whole inputs. ``rowwise`` splits what goes in: each rank computes a summand of whole
         *             outputs from its part of the inputs. ``colwise_gather`` is ``colwise``, with the
         *             outputs gathered afterwards. Source: Shoeybi et al. 2019 (arXiv:1909.08053).
         */
        TensorParallelPlan: {
            /** Modules */
            modules: string[];
            /**
             * Style
             * @enum {string}
             */
            style: "colwise" | "rowwise" | "colwise_gather";
        };
        /**
         * TokenCreated
         * @description A new token. ``token`` is the secret itself, shown here and never again.
         */
        TokenCreated: {
            /**
             * Created At
             * Format: date-time
             */
            created_at: string;
            /** Created By */
            created_by: string;
            /**
             * Expired
             * @default false
             */
            expired: boolean;
            /** Expires At */
            expires_at: string | null;
            /** Id */
            id: string;
            /**
             * Label
             * @default
             */
            label: string;
            scope: components["schemas"]["Scope"];
            /** Subject */
            subject: string;
            /** Token */
            token: string;
        };
        /**
         * TokenList
         * @description All tokens, oldest first.
         */
        TokenList: {
            /** Items */
            items: components["schemas"]["TokenView"][];
        };
        /**
         * TokenRequest
         * @description A token to create. ``subject``: its holder, who owns the jobs that it submits.
         */
        TokenRequest: {
            /** Expires In S */
            expires_in_s?: number | null;
            /**
             * Label
             * @default
             */
            label: string;
            scope: components["schemas"]["Scope"];
            /** Subject */
            subject: string;
        };
        /**
         * TokenView
         * @description A token without its secret, which is not stored.
         */
        TokenView: {
            /**
             * Created At
             * Format: date-time
             */
            created_at: string;
            /** Created By */
            created_by: string;
            /**
             * Expired
             * @default false
             */
            expired: boolean;
            /** Expires At */
            expires_at: string | null;
            /** Id */
            id: string;
            /**
             * Label
             * @default
             */
            label: string;
            scope: components["schemas"]["Scope"];
            /** Subject */
            subject: string;
        };
        /**
         * TraceFileView
         * @description One rank's file. ``path`` is on the node, or an address in the bucket; ``bytes`` compressed; the steps are the first and last.
         */
        TraceFileView: {
            /** Bytes */
            bytes: number;
            /** First Step */
            first_step: number;
            /** Last Step */
            last_step: number;
            /** Node Id */
            node_id: string;
            /** Path */
            path: string;
            /** Rank */
            rank: number;
        };
        /**
         * TraceList
         * @description A job's newest traces, newest first.
         */
        TraceList: {
            /** Items */
            items: components["schemas"]["TraceView"][];
        };
        /**
         * TraceRequest
         * @description Record the next ``steps`` whole steps of these ranks, or of all.
         */
        TraceRequest: {
            /**
             * Ranks
             * @default [
             *       0
             *     ]
             */
            ranks: number[] | "all";
            /**
             * Steps
             * @default 3
             */
            steps: number;
        };
        /**
         * TraceState
         * @description The state of a trace: requested; its ranks record; all files written; or failed.
         * @enum {string}
         */
        TraceState: "REQUESTED" | "RECORDING" | "DONE" | "FAILED";
        /**
         * TraceView
         * @description A recording of some steps of ranks.
         *
         *     ``folder`` is below the storage root. A trace that FAILED may have the files of some ranks; then
         *     ``reason`` says which of the others failed first, and why.
         */
        TraceView: {
            /** Attempt */
            attempt: number;
            /**
             * Bytes
             * @default 0
             */
            bytes: number;
            /**
             * Created At
             * Format: date-time
             */
            created_at: string;
            /** Ended At */
            ended_at: string | null;
            /**
             * Files
             * @default []
             */
            files: components["schemas"]["TraceFileView"][];
            /** Folder */
            folder: string;
            /** Id */
            id: string;
            /** Job Id */
            job_id: string;
            /** Ranks */
            ranks: number[];
            /** Reason */
            reason: string | null;
            state: components["schemas"]["TraceState"];
            /** Steps */
            steps: number;
        };
        /**
         * TrainSpec
         * @description The training loop: steps, batch sizes, precision, evaluation.
         */
        TrainSpec: {
            /**
             * Clip Norm
             * @description Gradients are clipped to this norm; null: they are not clipped.
             * @default 1
             */
            clip_norm: number | null;
            /**
             * Deterministic
             * @description Only operators that give the same bits each time; slower.
             * @default false
             */
            deterministic: boolean;
            /** @description Ends training when evaluations stop improving; needs eval_every. null: all steps are made. */
            early_stop?: components["schemas"]["EarlyStopSpec"] | null;
            /** @description An exponential moving average of the weights, used for validation; null: none. */
            ema?: components["schemas"]["EmaSpec"] | null;
            /**
             * Eval Every
             * @description Steps between evaluations; 0: only after the last step.
             * @default 0
             */
            eval_every: number;
            /**
             * Global Batch
             * @description Samples of a step over all ranks; the data-parallel ranks must divide it.
             * @default 32
             */
            global_batch: number;
            /**
             * Micro Batch
             * @description Samples of one forward and backward on a rank; auto: the planner chooses.
             * @default auto
             */
            micro_batch: number | "auto";
            /**
             * @description Element types; float16 adds loss scaling.
             * @default {
             *       "params": "fp32",
             *       "reduce": "fp32"
             *     }
             */
            precision: components["schemas"]["PrecisionSpec"];
            /**
             * Seed
             * @description Seed of initial weights, data order and dropout.
             * @default 0
             */
            seed: number;
            /**
             * Steps
             * @description Optimizer steps; required unless an entrypoint counts its own.
             */
            steps: number;
        };
        /**
         * UnitPlan
         * @description Modules that become units.
         *
         *     A pattern is a module's name from the root, segments joined by dots, in which a whole
         *     segment may be ``*`` for any one name. ``"blocks.*"`` is each direct child of ``blocks``,
         *     ``"*"`` each direct child of the root, ``""`` the root itself.
         *
         *     A pattern with ``*`` stands alone and makes *each* match a unit. Names without it may stand
         *     together and make *one* unit of all.
         *
         *     Attributes:
         *         modules: Patterns, at least one.
         *         reshard_after_forward: None means yes, except for the root. A number reshards to groups
         *             of so many ranks; it divides `dp_shard`.
         *         param_dtype: Of computation and gathers; None means the plan's.
         *         reduce_dtype: Of gradient reduction; None means the plan's.
         *         offload: Whether slices, gradients and optimizer state live in host memory.
         *         shard_dims: Parameters that are sharded along another dim than 0.
         *         prefetch: How many units after it are gathered while it computes, and how many before
         *             it in backward. None leaves the order to the engine.
         *         recompute: Whether its activations are computed again in backward instead of being kept.
         *         compile: Whether its forward goes through `torch.compile`.
         */
        UnitPlan: {
            /**
             * Compile
             * @default false
             */
            compile: boolean;
            /** Modules */
            modules: string[];
            /**
             * Offload
             * @default false
             */
            offload: boolean;
            /** Param Dtype */
            param_dtype?: ("fp64" | "fp32" | "bf16" | "fp16") | null;
            /** Prefetch */
            prefetch?: number | null;
            /**
             * Recompute
             * @default false
             */
            recompute: boolean;
            /** Reduce Dtype */
            reduce_dtype?: ("fp64" | "fp32" | "bf16" | "fp16") | null;
            /** Reshard After Forward */
            reshard_after_forward?: boolean | number | null;
            /**
             * Shard Dims
             * @default []
             */
            shard_dims: components["schemas"]["ShardDim"][];
        };
        /**
         * UnreadableList
         * @description Records in the store that this version cannot read: keys, with the field or entry where one is meant.
         *
         *     ``left_out``: how many more there are.
         */
        UnreadableList: {
            /** Items */
            items: string[];
            /**
             * Left Out
             * @default 0
             */
            left_out: number;
        };
        /**
         * Version
         * @description The version of the controller that answers.
         */
        Version: {
            /**
             * Api
             * @default v1
             */
            api: string;
            /** Version */
            version: string;
        };
        /**
         * WandbSpec
         * @description Sends the metrics to Weights & Biases too; nodes need ``meshloom[wandb]``.
         *
         *     Each attempt is a run, in a group that is the job. ``offline`` writes into the folder ``wandb`` beside the
         *     logs, for ``wandb sync``.
         */
        WandbSpec: {
            /** @description The API key. */
            api_key?: components["schemas"]["SecretReference"] | null;
            /**
             * Base Url
             * @description A self-hosted server.
             */
            base_url?: string | null;
            /**
             * Entity
             * @description The team or user; null: that of the API key.
             */
            entity?: string | null;
            /**
             * Mode
             * @description offline: files for `wandb sync`, in the folder wandb beside the job's logs.
             * @default online
             * @enum {string}
             */
            mode: "online" | "offline";
            /**
             * Project
             * @description The project; null: W&B's default.
             */
            project?: string | null;
            /**
             * Tags
             * @description Tags of the runs.
             * @default []
             */
            tags: string[];
        };
        /**
         * WebhookCreated
         * @description A new webhook. ``secret`` signs what is sent; it is shown here and never again.
         */
        WebhookCreated: {
            /**
             * Created At
             * Format: date-time
             */
            created_at: string;
            /** Created By */
            created_by: string;
            /**
             * Delivered
             * @default 0
             */
            delivered: number;
            /** Delivered At */
            delivered_at: string | null;
            /**
             * Disabled
             * @description the receiver answered 410 Gone
             * @default false
             */
            disabled: boolean;
            /**
             * Dropped
             * @default 0
             */
            dropped: number;
            /**
             * Format
             * @enum {string}
             */
            format: "standard" | "slack";
            /** Id */
            id: string;
            /**
             * Kinds
             * @default []
             */
            kinds: string[];
            /**
             * Labels
             * @default []
             */
            labels: string[];
            /**
             * Last Error
             * @description why the last try failed; null: it did not
             */
            last_error: string | null;
            /**
             * Owner
             * @description whose jobs' events it gets; null: everybody's
             */
            owner: string | null;
            /** Secret */
            secret: string;
            /**
             * Url
             * @description scheme, host and port: what follows them may be a secret
             */
            url: string;
        };
        /**
         * WebhookList
         * @description Webhooks, oldest first: all of them for operators, else one's own.
         */
        WebhookList: {
            /** Items */
            items: components["schemas"]["WebhookView"][];
        };
        /**
         * WebhookRequest
         * @description Where to send which events.
         *
         *     ``kinds``: any of these, `checkpoint.*` means all that begin so; none: all. ``labels``: of jobs with all
         *     of these, each `key=value` or `key`. ``format``: as Standard Webhooks describes, or a text for Slack.
         *     A submitter's webhook gets the events of the submitter's own jobs.
         */
        WebhookRequest: {
            /**
             * Format
             * @default standard
             * @enum {string}
             */
            format: "standard" | "slack";
            /**
             * Kinds
             * @default []
             */
            kinds: string[];
            /**
             * Labels
             * @default []
             */
            labels: string[];
            /**
             * Url
             * Format: uri
             */
            url: string;
        };
        /**
         * WebhookView
         * @description A webhook and how its deliveries go. ``dropped``: events that were given up or trimmed.
         */
        WebhookView: {
            /**
             * Created At
             * Format: date-time
             */
            created_at: string;
            /** Created By */
            created_by: string;
            /**
             * Delivered
             * @default 0
             */
            delivered: number;
            /** Delivered At */
            delivered_at: string | null;
            /**
             * Disabled
             * @description the receiver answered 410 Gone
             * @default false
             */
            disabled: boolean;
            /**
             * Dropped
             * @default 0
             */
            dropped: number;
            /**
             * Format
             * @enum {string}
             */
            format: "standard" | "slack";
            /** Id */
            id: string;
            /**
             * Kinds
             * @default []
             */
            kinds: string[];
            /**
             * Labels
             * @default []
             */
            labels: string[];
            /**
             * Last Error
             * @description why the last try failed; null: it did not
             */
            last_error: string | null;
            /**
             * Owner
             * @description whose jobs' events it gets; null: everybody's
             */
            owner: string | null;
            /**
             * Url
             * @description scheme, host and port: what follows them may be a secret
             */
            url: string;
        };
        /**
         * WorldSpec
         * @description An elastic job's bounds: it runs with as many ranks between them as fit.
         */
        WorldSpec: {
            /**
             * Max
             * @description The most ranks.
             */
            max: number;
            /**
             * Min
             * @description The fewest ranks with which the job runs.
             * @default 1
             */
            min: number;
        };
    };
    responses: never;
    parameters: never;
    requestBodies: never;
    headers: never;
    pathItems: never;
}
export type AttemptList = components['schemas']['AttemptList'];
export type AttemptView = components['schemas']['AttemptView'];
export type AuditEntryView = components['schemas']['AuditEntryView'];
export type AuditPage = components['schemas']['AuditPage'];
export type AxisTraffic = components['schemas']['AxisTraffic'];
export type BestPatch = components['schemas']['BestPatch'];
export type BoundsPatch = components['schemas']['BoundsPatch'];
export type BudgetPatch = components['schemas']['BudgetPatch'];
export type CapacityView = components['schemas']['CapacityView'];
export type CheckpointList = components['schemas']['CheckpointList'];
export type CheckpointSpec = components['schemas']['CheckpointSpec'];
export type CheckpointState = components['schemas']['CheckpointState'];
export type CheckpointView = components['schemas']['CheckpointView'];
export type CloneOrigin = components['schemas']['CloneOrigin'];
export type CloneRequest = components['schemas']['CloneRequest'];
export type CodeView = components['schemas']['CodeView'];
export type Device = components['schemas']['Device'];
export type DiagnosisView = components['schemas']['DiagnosisView'];
export type DrainRequest = components['schemas']['DrainRequest'];
export type EarlyStopSpec = components['schemas']['EarlyStopSpec'];
export type EmaSpec = components['schemas']['EmaSpec'];
export type EntryPoint = components['schemas']['EntryPoint'];
export type EstimateView = components['schemas']['EstimateView'];
export type Evaluation = components['schemas']['Evaluation'];
export type EvaluationSpec = components['schemas']['EvaluationSpec'];
export type EventPage = components['schemas']['EventPage'];
export type EventView = components['schemas']['EventView'];
export type Exchange = components['schemas']['Exchange'];
export type ExitReason = components['schemas']['ExitReason'];
export type ExportedFile = components['schemas']['ExportedFile'];
export type ExportManifest = components['schemas']['ExportManifest'];
export type ExportView = components['schemas']['ExportView'];
export type Factory = components['schemas']['Factory'];
export type FailureClass = components['schemas']['FailureClass'];
export type FailureView = components['schemas']['FailureView'];
export type Fault = components['schemas']['Fault'];
export type FaultSpec = components['schemas']['FaultSpec'];
export type FromPlan = components['schemas']['FromPlan'];
export type GangPlan = components['schemas']['GangPlan'];
export type Health = components['schemas']['Health'];
export type Inventory = components['schemas']['Inventory'];
export type JobPage = components['schemas']['JobPage'];
export type JobPatch = components['schemas']['JobPatch'];
export type JobSpec = components['schemas']['JobSpec'];
export type JobState = components['schemas']['JobState'];
export type JobView = components['schemas']['JobView'];
export type JsonValue = components['schemas']['JsonValue'];
export type KeepBestSpec = components['schemas']['KeepBestSpec'];
export type LogPage = components['schemas']['LogPage'];
export type LogView = components['schemas']['LogView'];
export type MeasuredView = components['schemas']['MeasuredView'];
export type MemoryView = components['schemas']['MemoryView'];
export type MeshPlan = components['schemas']['MeshPlan'];
export type MeshSpec = components['schemas']['MeshSpec'];
export type MetricPoint = components['schemas']['MetricPoint'];
export type MetricsPart = components['schemas']['MetricsPart'];
export type MetricsSpec = components['schemas']['MetricsSpec'];
export type MetricsView = components['schemas']['MetricsView'];
export type MlflowSpec = components['schemas']['MlflowSpec'];
export type NodeCapacity = components['schemas']['NodeCapacity'];
export type NodeFacts = components['schemas']['NodeFacts'];
export type NodeList = components['schemas']['NodeList'];
export type NodeState = components['schemas']['NodeState'];
export type NodeView = components['schemas']['NodeView'];
export type OptimizerSpec = components['schemas']['OptimizerSpec'];
export type ParameterGroup = components['schemas']['ParameterGroup'];
export type PlanAlternative = components['schemas']['PlanAlternative'];
export type PlanFailure = components['schemas']['PlanFailure'];
export type PlanList = components['schemas']['PlanList'];
export type PlanProbe = components['schemas']['PlanProbe'];
export type PlanState = components['schemas']['PlanState'];
export type PlanSummary = components['schemas']['PlanSummary'];
export type PlanUnit = components['schemas']['PlanUnit'];
export type PlanView = components['schemas']['PlanView'];
export type PoolKind = components['schemas']['PoolKind'];
export type PoolList = components['schemas']['PoolList'];
export type PoolView = components['schemas']['PoolView'];
export type PrecisionSpec = components['schemas']['PrecisionSpec'];
export type Problem = components['schemas']['Problem'];
export type Progress = components['schemas']['Progress'];
export type QueueEntry = components['schemas']['QueueEntry'];
export type QueueView = components['schemas']['QueueView'];
export type RankList = components['schemas']['RankList'];
export type RankMemory = components['schemas']['RankMemory'];
export type RankPlacement = components['schemas']['RankPlacement'];
export type RankStacks = components['schemas']['RankStacks'];
export type RankView = components['schemas']['RankView'];
export type ReplicasView = components['schemas']['ReplicasView'];
export type ReservationState = components['schemas']['ReservationState'];
export type ReservationView = components['schemas']['ReservationView'];
export type ResourcesPatch = components['schemas']['ResourcesPatch'];
export type ResourceSpec = components['schemas']['ResourceSpec'];
export type ResumeRequest = components['schemas']['ResumeRequest'];
export type RetentionPatch = components['schemas']['RetentionPatch'];
export type Scope = components['schemas']['Scope'];
export type SecretReference = components['schemas']['SecretReference'];
export type ShardDim = components['schemas']['ShardDim'];
export type ShardingPlan = components['schemas']['ShardingPlan'];
export type ShardView = components['schemas']['ShardView'];
export type SparseJobPage = components['schemas']['SparseJobPage'];
export type StepTimeView = components['schemas']['StepTimeView'];
export type StepView = components['schemas']['StepView'];
export type StopRequest = components['schemas']['StopRequest'];
export type TensorParallelPlan = components['schemas']['TensorParallelPlan'];
export type TokenCreated = components['schemas']['TokenCreated'];
export type TokenList = components['schemas']['TokenList'];
export type TokenRequest = components['schemas']['TokenRequest'];
export type TokenView = components['schemas']['TokenView'];
export type TraceFileView = components['schemas']['TraceFileView'];
export type TraceList = components['schemas']['TraceList'];
export type TraceRequest = components['schemas']['TraceRequest'];
export type TraceState = components['schemas']['TraceState'];
export type TraceView = components['schemas']['TraceView'];
export type TrainSpec = components['schemas']['TrainSpec'];
export type UnitPlan = components['schemas']['UnitPlan'];
export type UnreadableList = components['schemas']['UnreadableList'];
export type Version = components['schemas']['Version'];
export type WandbSpec = components['schemas']['WandbSpec'];
export type WebhookCreated = components['schemas']['WebhookCreated'];
export type WebhookList = components['schemas']['WebhookList'];
export type WebhookRequest = components['schemas']['WebhookRequest'];
export type WebhookView = components['schemas']['WebhookView'];
export type WorldSpec = components['schemas']['WorldSpec'];
export type $defs = Record<string, never>;
export type operations = Record<string, never>;
