// eldr: routes each request to the llama.cpp worker whose batch already uses the same experts.
//
// Made from src/capi by cbindgen: change it there.
//
// Two ways to use it. The whole engine, for a library built with llama.cpp: eldr_engine_open(), eldr_engine_submit(),
// eldr_request_next(). Or only the router, for a program with its own llama.cpp, of any version, which eldr then neither
// links nor calls: eldr_tap_*() or eldr_counts_add() for what a prompt picks, eldr_signature_open(), eldr_router_route(); for the policy
// `marginal_cost` eldr_router_route_request(), eldr_router_leave() and eldr_router_step().
//
// What every function keeps
// - It returns an eldr_status, save the few that can not fail. From 100 on the call did nothing and eldr_last_error()
//   says, to the thread that called, what was wrong, where, and what to do.
// - A handle (a pointer to one of the opaque types) may be used by any thread, by several at once. One that was freed,
//   or is of another kind, is ELDR_STATUS_HANDLE; NULL is ELDR_STATUS_NULL, and for the _free functions nothing at all.
//   Handles may be freed in any order.
// - It unwinds nothing into C, and keeps no pointer it is given unless its comment says so.
// - Text it gives out is eldr's: it is UTF-8, and stays as long as the comment says.
// - A struct begins with its `size`. The _default_params and _init functions set it; in structs to be filled the caller
//   does. Structs are passed by pointer: one passed by value could not grow, because caller and library must agree on
//   how long it is.
//
// What stays
// - ELDR_ABI_VERSION and the soname tell versions of this interface apart, not eldr_version(). Within one soname nothing
//   is taken away: functions keep their arguments, statuses and other enums their numbers, structs their fields and order.
// - What may come: functions, statuses, events, policies, names of reasons, keys of JSON objects, and fields at the end of
//   structs, with which ELDR_ABI_VERSION grows. So let a program pass unknown statuses from 100 on as errors, and unknown
//   events.
// - A program works with a library whose ABI version is its own or newer: fields that it does not know stay at their
//   defaults. An older library refuses its longer structs with ELDR_STATUS_STRUCT_SIZE. eldr_tensor_layout, eldr_logit_bias
//   and eldr_token_logprob have no `size` and never grow.
// - Sentences (eldr_last_error(), log lines) may change with every version: do not compare them.
//
// What every function asks
// - A pointer is NULL or points to what its type and comment say, for the length of the call. Strings end in NUL and are
//   UTF-8. Arrays are as long as said.
// - A callback does not throw, and stays as long as it can be called.
// - A process that forks uses eldr in the child only if the parent did not.


#ifndef ELDR_H
#define ELDR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct ggml_tensor;


// Version of the C ABI this header describes. It grows when something is added and nothing is ever taken away; a
// program runs with a library whose eldr_abi_version() is at least the one it was compiled with.
#define ELDR_ABI_VERSION 1

// What a call came to. The numbers stay what they are; new ones may be added.
//
// 0 is success. Below 100 are answers that are no mistake. From 100 on the call did nothing, and eldr_last_error()
// says what was wrong, where, and what to do.
enum eldr_status
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // Done.
  ELDR_STATUS_OK = 0,
  // Nothing has happened yet, or not in the time given.
  ELDR_STATUS_WAIT = 1,
  // The request has ended and everything was read.
  ELDR_STATUS_END = 2,
  // The counts weigh nothing, so they have no direction: route by load.
  ELDR_STATUS_NO_SIGNATURE = 3,
  // Every running worker is full: keep the request and route it again when one has room.
  ELDR_STATUS_FULL = 4,
  // Every worker is lost or drained.
  ELDR_STATUS_NO_WORKER = 5,
  // A pointer that must not be NULL is.
  ELDR_STATUS_NULL = 100,
  // The handle was freed, was never made, or is of another kind.
  ELDR_STATUS_HANDLE = 101,
  // A struct's `size` is not that of this library: it was not initialised, or header and library differ.
  ELDR_STATUS_STRUCT_SIZE = 102,
  // A value is out of its range.
  ELDR_STATUS_ARGUMENT = 103,
  // A string is not UTF-8.
  ELDR_STATUS_UTF8 = 104,
  // The buffer is too small; how much is needed was written.
  ELDR_STATUS_BUFFER = 105,
  // This build of the library can not do it.
  ELDR_STATUS_UNSUPPORTED = 106,
  // The call may not be made from the log callback.
  ELDR_STATUS_REENTRANT = 107,
  // eldr has a fault: it panicked, and the panic was caught.
  ELDR_STATUS_PANIC = 108,
  // A file could not be read.
  ELDR_STATUS_FILE = 109,
  // The calibration is not one, or does not fit the model or the workers.
  ELDR_STATUS_CALIBRATION = 110,
  // The settings do not fit together.
  ELDR_STATUS_CONFIG = 111,
  // The request can not be run as it stands.
  ELDR_STATUS_REQUEST = 112,
  // As many requests as allowed are waiting.
  ELDR_STATUS_QUEUE_FULL = 113,
  // The engine takes no more requests.
  ELDR_STATUS_DRAINING = 114,
  // llama.cpp refused.
  ELDR_STATUS_LLAMA = 115,
  // The tensor layout given is not that of the ggml that runs.
  ELDR_STATUS_LAYOUT = 116,
  // The tap did not see what it must see; its picks can not be used.
  ELDR_STATUS_TAP = 117,
  // Counts, signature or cache belong to another calibration.
  ELDR_STATUS_MISMATCH = 118,
  // A worker failed.
  ELDR_STATUS_RUN = 119,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum eldr_status eldr_status;
#else
typedef int32_t eldr_status;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// What an eldr_event tells.
enum eldr_event_kind
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // A token was drawn: `token`, and in `text` the characters it completes.
  ELDR_EVENT_KIND_TOKEN = 0,
  // The decode worker was chosen: `decision`.
  ELDR_EVENT_KIND_ROUTED = 1,
  // The request ended: `finish`, what it used, and in `text` what was left of a character. Nothing follows.
  ELDR_EVENT_KIND_END = 2,
  // The request could not be run: `text` says why. Nothing follows.
  ELDR_EVENT_KIND_FAILED = 3,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum eldr_event_kind eldr_event_kind;
#else
typedef int32_t eldr_event_kind;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Why a request ended.
enum eldr_finish
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // It has not.
  ELDR_FINISH_NONE = 0,
  // The model ended its text.
  ELDR_FINISH_STOP = 1,
  // max_tokens or the slot's length was reached.
  ELDR_FINISH_LENGTH = 2,
  // It was cancelled.
  ELDR_FINISH_CANCELLED = 3,
  // Its deadline passed.
  ELDR_FINISH_DEADLINE = 4,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum eldr_finish eldr_finish;
#else
typedef int32_t eldr_finish;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Picks of what the host's KV cache holds.
typedef struct eldr_cache eldr_cache;

// A calibration: what turns counts into signatures, and one centroid a decode worker.
typedef struct eldr_calibration eldr_calibration;

// How often a prompt's tokens picked each expert.
typedef struct eldr_counts eldr_counts;

// A model served by several workers.
typedef struct eldr_engine eldr_engine;

// A request that was submitted.
typedef struct eldr_request eldr_request;

// A routing policy and the loads of the workers it chooses between.
typedef struct eldr_router eldr_router;

// The direction of a prompt's picks.
typedef struct eldr_signature eldr_signature;

// Reads picks from the host's own llama.cpp while it computes.
typedef struct eldr_tap eldr_tap;

// Gets one line: its level (1 error, 2 warning, 3 information, 4 detail, 5 trace) and its text, which lives for the
// call. Called on any thread of eldr or of the host, on several at once; must call nothing of eldr.
typedef void (*eldr_log_callback)(int32_t level, const char *text, void *user);

// A model's experts. Fill it with eldr_model_shape_init() first.
typedef struct eldr_model_shape {
  // sizeof(eldr_model_shape).
  size_t size;
  // llama.cpp's numbers of the layers that have experts, ascending; NULL is all layers. Read before the call returns.
  const uint32_t *layers;
  // How many they are.
  size_t n_layers;
  // Layers of the model, dense ones too.
  uint32_t n_layer;
  // Experts a layer.
  uint32_t n_expert;
  // Experts a token picks in a layer.
  uint32_t n_expert_used;
  // 0 for now.
  uint32_t reserved;
} eldr_model_shape;

// What an eldr_calibration was made for. Set `size` to sizeof(eldr_calibration_facts) before it is filled.
typedef struct eldr_calibration_facts {
  // sizeof(eldr_calibration_facts).
  size_t size;
  // Decode workers: centroid i belongs to worker i. 0 if there are no centroids.
  uint32_t n_workers;
  // Layers of the model, dense ones too.
  uint32_t n_layer;
  // Layers whose picks are wanted: those a signature is made of, or all that a prompt shows.
  uint32_t n_layer_used;
  // Experts a layer.
  uint32_t n_expert;
  // Experts a token picks in a layer.
  uint32_t n_expert_used;
  // Width of the locality band it was made with.
  float tau;
  // How well picks in prefill tell picks in decode: a rank correlation, 1 is perfectly.
  double rho;
  // What the model it was made for is told by. Lives for ever.
  const char *fingerprint;
} eldr_calibration_facts;

// Where the fields of struct ggml_tensor are, in bytes, as the host's compiler laid it out: ELDR_TENSOR_LAYOUT_INIT
// fills it where ggml.h is included before eldr.h.
typedef struct eldr_tensor_layout {
  // sizeof(struct ggml_tensor).
  size_t n_bytes;
  // Of `type`, 4 bytes.
  size_t offset_type;
  // Of `ne`, four int64_t.
  size_t offset_ne;
  // Of `nb`, four size_t.
  size_t offset_nb;
  // Of `name`.
  size_t offset_name;
  // GGML_MAX_NAME.
  size_t n_name;
  // GGML_TYPE_I32.
  int32_t type_i32;
} eldr_tensor_layout;

// ggml_get_name.
typedef const char *(*eldr_get_name)(const struct ggml_tensor *tensor);

// ggml_nbytes.
typedef size_t (*eldr_get_bytes)(const struct ggml_tensor *tensor);

// ggml_backend_tensor_get.
typedef void (*eldr_tensor_get)(const struct ggml_tensor *tensor, void *data, size_t offset, size_t size);

// How a tap is made. Fill it with eldr_tap_default_params() first.
typedef struct eldr_tap_params {
  // sizeof(eldr_tap_params).
  size_t size;
  // Whose layers are read. Its handle may be freed afterwards.
  const struct eldr_calibration *calibration;
  // Where the fields of the host's tensors are.
  struct eldr_tensor_layout layout;
  // ggml_get_name of the host's ggml.
  eldr_get_name get_name;
  // ggml_nbytes of the host's ggml.
  eldr_get_bytes get_bytes;
  // ggml_backend_tensor_get of the host's ggml.
  eldr_tensor_get tensor_get;
} eldr_tap_params;

// How a router is made. Fill it with eldr_router_default_params() first.
typedef struct eldr_router_params {
  // sizeof(eldr_router_params).
  size_t size;
  // The policy's name; NULL is `locality_band`. eldr_policy_names() has them all, and `auto` is `marginal_cost`, or
  // `least_loaded` where that has nothing to gain.
  const char *policy;
  // For policies that compare signatures, and for `marginal_cost`, which wants one of eldr_calibration_widen() or
  // eldr_calibration_of_shape(); NULL for the others. Its handle may be freed afterwards.
  const struct eldr_calibration *calibration;
  // Decode workers, numbered from 0; 0 is as many as the calibration has centroids.
  uint32_t n_workers;
  // Requests each of them can hold, until eldr_router_set_worker() says otherwise.
  uint32_t n_slots;
  // Width of the locality band, a cosine distance; NaN is the calibration's.
  float tau;
  // Fewest workers of the locality band.
  uint32_t min_band;
  // Seed of the policies that draw.
  uint64_t seed;
  // The workload's domains separated by commas, for the `domain` policy; may be NULL.
  const char *domains;
} eldr_router_params;

// Where a request goes, and why. Set `size` to sizeof(eldr_decision) before it is filled.
typedef struct eldr_decision {
  // sizeof(eldr_decision).
  size_t size;
  // The chosen worker.
  uint32_t worker;
  // Eligible workers the policy chose between at the end: the band's size.
  uint32_t band;
  // Requests the chosen worker held before this one.
  uint32_t n_inflight;
  // Cosine of the signature and the chosen worker's centroid; NaN where the policy does not compare them.
  float similarity;
  // The largest such cosine over eligible workers; NaN as above.
  float best_similarity;
  // What decided, such as `band`, `no_signature` or `load`. Lives for ever.
  const char *reason;
  // Distinct experts that a step of the worker reads without the request, summed over the layers; NaN, like all that
  // follows, where the policy does not predict it.
  float experts;
  // Distinct experts that the request adds.
  float added_experts;
  // Time of a step with the request, in the unit of the steps that the policy was told of.
  double step_time;
  // Time that all sequences of the batch, the new one included, wait longer for each token.
  double cost;
  // What was added to the cost for being less similar to the worker's centroid than to the best one.
  double regret;
} eldr_decision;

// A request that a router knows by its number. Fill it with eldr_route_request_init() first.
typedef struct eldr_route_request {
  // sizeof(eldr_route_request).
  size_t size;
  // Its number, unlike those of all others that are placed.
  uint64_t id;
  // Its signature; NULL if it has none.
  const struct eldr_signature *signature;
  // The picks of its prompt, which `marginal_cost` predicts from; may be NULL. Read before the call returns.
  const struct eldr_counts *counts;
  // A label for the `domain` policy; may be NULL.
  const char *domain;
  // Tokens of context it brings; 0 is as many as were counted.
  uint32_t n_tokens;
  // 0 for now.
  uint32_t reserved;
} eldr_route_request;

// How a model is served. Fill it with eldr_engine_default_params() first. Strings are read before eldr_engine_open()
// returns.
typedef struct eldr_engine_params {
  // sizeof(eldr_engine_params).
  size_t size;
  // The GGUF file.
  const char *model;
  // The calibration file, for policies that compare signatures; may be NULL.
  const char *calibration;
  // The routing policy's name; NULL is `auto`: `marginal_cost`, with centroids if there is a calibration, or
  // `least_loaded` for a dense model and where the calibration says that locality does not help.
  const char *policy;
  // Prefill workers such as `1` or `2@cuda:0`; NULL is one on the best device.
  const char *prefill;
  // Decode workers such as `8@cpu` or `2@cuda:0,2@cuda:1`; NULL is two on the best device.
  const char *decode;
  // Sequences a worker holds.
  uint32_t n_slots;
  // Tokens of a sequence, prompt and output together. More than the model was trained with are cut to that, which
  // `n_ctx_slot` of eldr_engine_stats_json() tells.
  uint32_t n_ctx_slot;
  // Prompt tokens a prefill step runs.
  uint32_t chunk;
  // Threads of each CPU worker; 0 divides the cores among them.
  uint32_t n_threads;
  // Layers on the device; below 0 all.
  int32_t n_gpu_layers;
  // Keep the experts of the first so many layers in host memory; below 0 of all.
  int32_t n_cpu_moe;
  // `auto`, `on` or `off`; NULL is `auto`.
  const char *flash_attention;
  // Type of keys and values: `f16`, `q8_0` or `f32`; NULL is `f16`.
  const char *kv_format;
  // Not 0: texts do not depend on worker, policy or batch, to the bit, on the CPU without flash attention.
  uint32_t exact;
  // 0: read the model file instead of mapping it.
  uint32_t use_mmap;
  // Width of the locality band; NaN is the calibration's.
  float tau;
  // Fewest workers of the locality band.
  uint32_t min_band;
  // Seed of the policies that draw.
  uint64_t seed;
  // The workload's domains separated by commas, for the `domain` policy; may be NULL.
  const char *domains;
  // Requests that may wait; more are refused.
  uint32_t max_queue;
  // Requests given to one prefill worker at a time.
  uint32_t max_prefill;
  // Prefilled requests that may wait for a place on a decode worker; prefill pauses at this many.
  uint32_t max_handoffs;
  // Of those, the cheapest for the running batches goes first, as long as none waits for more than so many times its
  // turn; 1 is everybody in turn.
  uint32_t age_bound;
  // What prefill workers keep of finished prompts, for prompts that begin alike: `on`, `off`, a number of tokens, or
  // a size such as `512MiB`; NULL is `on`.
  const char *prefix_cache;
  // MiB of host memory for what had to make room there; 0 is none.
  uint64_t cache_ram_mib;
  // Fit the centroids to the traffic while serving: 0 does not, above 0 does; below 0 does where the policy is `auto`
  // and there is a calibration.
  int32_t refit;
  // 0 for now.
  uint32_t reserved;
} eldr_engine_params;

// What is added to a token's logit.
typedef struct eldr_logit_bias {
  // The token.
  int32_t token;
  // What is added.
  float bias;
} eldr_logit_bias;

// A token and how likely it was.
typedef struct eldr_token_logprob {
  // The token.
  int32_t token;
  // Natural logarithm of its probability, by the model's own distribution: before bias, grammar, penalties, truncation
  // and temperature.
  float logprob;
} eldr_token_logprob;

// What happened to a request. Set `size` to sizeof(eldr_event) before it is filled.
typedef struct eldr_event {
  // sizeof(eldr_event).
  size_t size;
  // What happened; the fields that are not of its kind are 0, and `text` is never NULL.
  eldr_event_kind kind;
  // The token.
  int32_t token;
  // Text in UTF-8, only whole characters, NUL behind it. eldr owns it; it stays until the thread's next call that
  // gives out text, and for the call of a callback.
  const char *text;
  // Its bytes without that NUL.
  size_t n_text;
  // When it happened, in nanoseconds since the engine's start; for tokens and decisions.
  uint64_t at_ns;
  // Why the request ended.
  eldr_finish finish;
  // Tokens of the prompt.
  uint32_t n_prompt;
  // Tokens generated.
  uint32_t n_generated;
  // Tokens of the prompt that were not computed, because a worker still held their keys and values.
  uint32_t n_cached;
  // The decision; NULL in events of other kinds. eldr's: it stays as long as `text`.
  const struct eldr_decision *decision;
  // How likely the drawn token was, as eldr_token_logprob has it; NaN unless the request asked for it.
  float logprob;
  // How many `top` has.
  uint32_t n_top;
  // The likeliest tokens, likeliest first; NULL if there are none. eldr's: it stays as long as `text`.
  const struct eldr_token_logprob *top;
} eldr_event;

// Gets what happens to a request, one event after another, on a thread that eldr starts for it. `event` lives for the
// call. Answers whether to go on: false cancels the request, and no more calls follow.
//
// It may call anything of eldr, eldr_request_cancel() and eldr_request_free() of its own request, too. It must not throw.
typedef bool (*eldr_event_callback)(struct eldr_request *request, const struct eldr_event *event, void *user);

// A request. Fill it with eldr_request_default_params() first.
typedef struct eldr_request_params {
  // sizeof(eldr_request_params).
  size_t size;
  // The prompt's tokens, special ones included; read before eldr_engine_submit() returns.
  const int32_t *prompt;
  // How many they are; at least 1.
  size_t n_prompt;
  // Tokens to generate at most; at least 1.
  uint32_t max_tokens;
  // 0 takes the likeliest token.
  float temperature;
  // Keep the so many likeliest tokens; 0 keeps all.
  uint32_t top_k;
  // Keep the smallest set of likeliest tokens whose probability reaches this; 1 keeps all.
  float top_p;
  // Drop tokens less likely than this share of the likeliest; 0 keeps all.
  float min_p;
  // Divide the logits of the last `penalty_last_n` tokens by this; 1 is off.
  float penalty_repeat;
  // Lower a token's logit by this for each time it occurred; 0 is off.
  float penalty_freq;
  // Lower a token's logit by this when it occurred; 0 is off.
  float penalty_present;
  // Generated tokens the penalties look back at.
  uint32_t penalty_last_n;
  // Not 0: go on after a token that ends the text.
  uint32_t ignore_eos;
  // Seed of the draws.
  uint64_t seed;
  // Longest time from here to the last token in milliseconds; 0 is none.
  uint64_t deadline_ms;
  // A label for the `domain` policy; may be NULL.
  const char *domain;
  // A grammar (GBNF, start symbol `root`) that the text must match; may be NULL.
  const char *grammar;
  // Added to the logits of tokens, each at most once; minus infinity forbids one. Read before eldr_engine_submit()
  // returns.
  const struct eldr_logit_bias *logit_bias;
  // How many they are.
  size_t n_logit_bias;
  // Tell how likely each drawn token was, and so many of the likeliest; below 0 tell nothing.
  int32_t n_logprobs;
  // Not 0: go before normal requests in the queue, but for every fourth turn.
  uint32_t is_urgent;
  // Gets the request's events; NULL to ask for them by eldr_request_next().
  eldr_event_callback on_event;
  // Passed to `on_event`; must stay until the request is freed.
  void *user;
  // Texts of which the first to occur ends the request as ELDR_FINISH_STOP; neither it nor what is behind it is told.
  // What may be the start of one is held back, so a token's text may come with a later event. Read before
  // eldr_engine_submit() returns.
  const char *const *stop;
  // How many they are.
  size_t n_stop;
} eldr_request_params;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The library's version of the C ABI. Never fails. Any thread.
uint32_t eldr_abi_version(void);

// The library's version, such as `0.1.0`; it lives for ever. Never fails. Any thread.
const char *eldr_version(void);

// Whether this library has llama.cpp in it, so that eldr_engine_open() works; without, it has the router for programs
// that run llama.cpp themselves. Never fails. Any thread.
bool eldr_has_engine(void);

// What was wrong in the calling thread's last call that returned a status from 100 on: one sentence, of an engine's
// settings one a line for each mistake; empty before the first. eldr owns it; it stays until the thread's next call that fails. Never fails. Any thread.
const char *eldr_last_error(void);

// A status's name, such as `ELDR_STATUS_FULL`, or `unknown`; it lives for ever. Never fails. Any thread.
const char *eldr_status_name(int32_t status);

// Writes the names of all routing policies, separated by commas, to `names`; they live for ever. Any thread.
eldr_status eldr_policy_names(const char **names);

// Gives the lines of `level` and below (1 error to 5 trace; 0 none) to `callback`, with `user`; NULL stops it. The
// lines are eldr's and llama.cpp's, of which errors are warnings here, warnings information, and so on.
//
// Process-wide. When it returns, no thread is in the callback set before, and its `user` may go. Any thread, but not
// from the callback. Errors: ELDR_STATUS_ARGUMENT for another level, ELDR_STATUS_UNSUPPORTED if the process is a Rust
// program that has a logger.
eldr_status eldr_log_set(int32_t level, eldr_log_callback callback, void *user);

// Reads a calibration file into a new handle in `out`, which the caller frees. Any thread.
//
// Errors: ELDR_STATUS_FILE if it can not be read, ELDR_STATUS_CALIBRATION if it is none.
eldr_status eldr_calibration_open(const char *path, struct eldr_calibration **out);

// Like eldr_calibration_open(), from the file's `n_bytes` bytes in memory, which are not kept. Any thread.
//
// Errors: ELDR_STATUS_CALIBRATION if they are none.
eldr_status eldr_calibration_read(const uint8_t *bytes, size_t n_bytes, struct eldr_calibration **out);

// Opens in `out`, which the caller frees, the same calibration for counts, taps and caches of every layer that a prompt
// shows, not only of those signatures are made of: what the policy `marginal_cost` predicts from. Any thread.
//
// What was opened under one of the two does not go with what was opened under the other.
eldr_status eldr_calibration_widen(const struct eldr_calibration *calibration, struct eldr_calibration **out);

// Fills `shape`, of `size` bytes (sizeof(eldr_model_shape)), with nothing; the numbers are the host's. Any thread.
eldr_status eldr_model_shape_init(struct eldr_model_shape *shape, size_t size);

// Opens in `out`, which the caller frees, what is known of a model that was never calibrated: its experts. Any thread.
//
// Under it all layers that a prompt shows are counted and nothing has a signature; it has no centroids, so a router of
// it is told its number of workers. The policy `marginal_cost` needs no more.
// Errors: ELDR_STATUS_ARGUMENT for a shape no model has.
eldr_status eldr_calibration_of_shape(const struct eldr_model_shape *shape, struct eldr_calibration **out);

// Fills `out`, whose `size` is set, with what the calibration was made for. Any thread.
eldr_status eldr_calibration_get_facts(const struct eldr_calibration *calibration, struct eldr_calibration_facts *out);

// Copies the llama.cpp numbers of the layers whose picks are wanted, ascending, to `layers`, which has room for `room`;
// writes to `n`, unless it is NULL, how many there are. Any thread.
//
// Errors: ELDR_STATUS_BUFFER if there is too little room.
eldr_status eldr_calibration_get_layers(const struct eldr_calibration *calibration,
                                        uint32_t *layers,
                                        size_t room,
                                        size_t *n);

// Frees the handle; NULL is let pass. What was made from it stays usable. Any thread.
eldr_status eldr_calibration_free(struct eldr_calibration *calibration);

// Opens counts of no tokens yet in `out`, for the layers of a calibration; the caller frees them. Any thread; the
// calibration's handle may be freed before.
eldr_status eldr_counts_open(const struct eldr_calibration *calibration, struct eldr_counts **out);

// Counts the picks of `n_tokens` tokens in llama.cpp's layer `layer`: `experts` has n_expert_used ids for each token.
// Any thread.
//
// Errors: ELDR_STATUS_ARGUMENT for a layer that the calibration does not use and for an id that is no expert; then
// nothing is counted.
eldr_status eldr_counts_add(struct eldr_counts *counts, uint32_t layer, const int32_t *experts, size_t n_tokens);

// Counts the picks of `n_tokens` tokens from the `first`-th of the batch the tap has just read, in all layers. Any
// thread.
//
// Errors: ELDR_STATUS_TAP unless eldr_tap_end() has found the batch good, ELDR_STATUS_ARGUMENT for tokens the batch does
// not have, ELDR_STATUS_MISMATCH for a tap of another calibration.
eldr_status eldr_counts_add_tap(struct eldr_counts *counts,
                                const struct eldr_tap *tap,
                                size_t first,
                                size_t n_tokens);

// Adds the counts `from` to the counts `to`. Any thread.
//
// Errors: ELDR_STATUS_MISMATCH for counts of another calibration, ELDR_STATUS_ARGUMENT if a layer would have counted more
// than 2^32 - 1 picks.
eldr_status eldr_counts_merge(struct eldr_counts *to,
                              const struct eldr_counts *from);

// Counts no tokens any more. Any thread.
eldr_status eldr_counts_clear(struct eldr_counts *counts);

// Writes how many tokens were counted to `n_tokens`. Any thread.
//
// Errors: ELDR_STATUS_TAP if the layers differ, because some token's picks were not added in every layer.
eldr_status eldr_counts_get_tokens(const struct eldr_counts *counts, uint32_t *n_tokens);

// Copies the counts of all experts in llama.cpp's layer `layer` to `row`, which has room for `room`; writes to `n`,
// unless it is NULL, how many there are. Any thread.
//
// Errors: ELDR_STATUS_ARGUMENT for a layer that the calibration does not use, ELDR_STATUS_BUFFER for too little room.
eldr_status eldr_counts_get_row(const struct eldr_counts *counts,
                                uint32_t layer,
                                uint32_t *row,
                                size_t room,
                                size_t *n);

// Frees the handle; NULL is let pass. Any thread.
eldr_status eldr_counts_free(struct eldr_counts *counts);

// Opens the signature of counts in `out`: a vector of length 1, which the caller frees. Any thread; the counts may be
// freed before.
//
// ELDR_STATUS_NO_SIGNATURE, and NULL in `out`, if nothing counted weighs anything: route with NULL then, by load.
// Errors: ELDR_STATUS_TAP if the layers have counted different tokens.
eldr_status eldr_signature_open(const struct eldr_counts *counts, struct eldr_signature **out);

// Copies the signature's entries, a row of experts for each layer used, to `values`, which has room for `room`; writes
// to `n`, unless it is NULL, how many there are. Any thread.
//
// Errors: ELDR_STATUS_BUFFER for too little room.
eldr_status eldr_signature_get_values(const struct eldr_signature *signature, float *values, size_t room, size_t *n);

// Writes how alike two signatures are to `cosine`: 1 if they point the same way, 0 if they share no expert. Any thread.
//
// Errors: ELDR_STATUS_MISMATCH for signatures of different calibrations.
eldr_status eldr_signature_compare(const struct eldr_signature *a, const struct eldr_signature *b, float *cosine);

// Frees the handle; NULL is let pass. Any thread.
eldr_status eldr_signature_free(struct eldr_signature *signature);

// Fills `params`, of `size` bytes (sizeof(eldr_tap_params)), with the defaults; the rest is the host's. Any thread.
eldr_status eldr_tap_default_params(struct eldr_tap_params *params, size_t size);

// Opens a tap in `out`, which the caller frees. Any thread.
//
// Give a context eldr_tap_on_node as `cb_eval` and the tap itself as `cb_eval_user_data` in its llama_context_params.
// One tap is for one context. It costs nothing between eldr_tap_end() and eldr_tap_begin().
// Errors: ELDR_STATUS_LAYOUT for a layout no compiler makes; one of another ggml is found at the first node and
// reported by eldr_tap_end().
eldr_status eldr_tap_open(const struct eldr_tap_params *params, struct eldr_tap **out);

// Reads the picks of the next llama_decode() of the tap's context. What was read before is forgotten. Any thread.
eldr_status eldr_tap_begin(struct eldr_tap *tap);

// Stops reading after a llama_decode() of `n_tokens` tokens and checks that every layer showed every token. Then
// eldr_counts_add_tap() and eldr_cache_add_tap() take what they want of it. Any thread.
//
// The picks are in the order of the ubatches' columns: that of the batch if it holds one sequence, or if the context
// has a unified KV cache. Several sequences in one batch without one are regrouped by llama.cpp: decode them apart.
// Errors: ELDR_STATUS_LAYOUT if the layout is not that of the ggml that runs, ELDR_STATUS_TAP if picks are missing or
// are none.
eldr_status eldr_tap_end(struct eldr_tap *tap, size_t n_tokens);

// Frees the handle; NULL is let pass. A context that still has the tap may decode: it is not listened to. Any thread.
eldr_status eldr_tap_free(struct eldr_tap *tap);

// A ggml_backend_sched_eval_callback: `user` is an eldr_tap. For llama.cpp only, on the thread that decodes.
//
// Answers `ask` with whether the node holds picks that are wanted, and always lets the computation go on. With a tap
// that was freed it wants nothing.
bool eldr_tap_on_node(struct ggml_tensor *tensor, bool ask, void *user);

// Opens an empty cache in `out`, which the caller frees: it keeps the picks of what is in the host's KV cache, if the
// host makes every call on its memory here, too. Then a prompt whose start was in the cache has the counts, and so the
// signature, of one prefilled whole. Any thread; the calibration's handle may be freed before.
eldr_status eldr_cache_open(const struct eldr_calibration *calibration, struct eldr_cache **out);

// Notes the picks of `n_tokens` tokens of sequence `seq` from position `pos` on: tokens `first` and after it of the
// batch the tap has just read. What was noted at these positions is forgotten. Any thread.
//
// Errors: as eldr_counts_add_tap(), and ELDR_STATUS_ARGUMENT for a sequence or positions that are none.
eldr_status eldr_cache_add_tap(struct eldr_cache *cache,
                               int32_t seq,
                               int32_t pos,
                               const struct eldr_tap *tap,
                               size_t first,
                               size_t n_tokens);

// Like eldr_cache_add_tap(), from ids: `experts` has, for each layer of eldr_calibration_get_layers() in its order,
// n_expert_used ids for each token. Any thread.
//
// Errors: ELDR_STATUS_ARGUMENT for an id that is no expert and for a sequence or positions that are none; then nothing
// is noted.
eldr_status eldr_cache_add(struct eldr_cache *cache, int32_t seq, int32_t pos, const int32_t *experts, size_t n_tokens);

// To call with llama_memory_seq_rm(), if that returned true: forgets positions `p0` to `p1` - 1 of `seq`; below 0 they
// are the first and the last, and a `seq` below 0 is every sequence. Any thread.
eldr_status eldr_cache_seq_rm(struct eldr_cache *cache, int32_t seq, int32_t p0, int32_t p1);

// To call with llama_memory_seq_cp(): positions `p0` to `p1` - 1 of `from` belong to `to`, too. Any thread.
//
// Errors of this and the next two: ELDR_STATUS_ARGUMENT for a sequence below 0.
eldr_status eldr_cache_seq_cp(struct eldr_cache *cache, int32_t from, int32_t to, int32_t p0, int32_t p1);

// To call with llama_memory_seq_keep(): forgets every sequence but `seq`. Any thread.
eldr_status eldr_cache_seq_keep(struct eldr_cache *cache, int32_t seq);

// To call with llama_memory_seq_add(): moves positions `p0` to `p1` - 1 of `seq` by `delta`. Any thread.
eldr_status eldr_cache_seq_add(struct eldr_cache *cache, int32_t seq, int32_t p0, int32_t p1, int32_t delta);

// To call with llama_memory_clear(): forgets everything. Any thread.
eldr_status eldr_cache_clear(struct eldr_cache *cache);

// Adds the picks of positions `p0` to `p1` - 1 of `seq` to `counts`, and writes to `n_tokens`, unless it is NULL, how
// many of them were known. Any thread.
//
// Errors: ELDR_STATUS_MISMATCH for counts of another calibration, ELDR_STATUS_ARGUMENT for a sequence below 0.
eldr_status eldr_cache_get_counts(const struct eldr_cache *cache,
                                  int32_t seq,
                                  int32_t p0,
                                  int32_t p1,
                                  struct eldr_counts *counts,
                                  uint32_t *n_tokens);

// Writes the bytes of memory that the picks take to `n_bytes`; what sequences share counts once. Any thread.
eldr_status eldr_cache_get_bytes(const struct eldr_cache *cache, size_t *n_bytes);

// Frees the handle; NULL is let pass. Any thread.
eldr_status eldr_cache_free(struct eldr_cache *cache);

// Fills `params`, of `size` bytes (sizeof(eldr_router_params)), with the defaults. Any thread.
eldr_status eldr_router_default_params(struct eldr_router_params *params, size_t size);

// Opens a router in `out`, whose workers are all idle; the caller frees it. Any thread.
//
// Errors: ELDR_STATUS_CONFIG for an unknown policy, one that needs a calibration, and settings that do not fit it.
eldr_status eldr_router_open(const struct eldr_router_params *params, struct eldr_router **out);

// Writes the name of the policy that routes, which is never `auto`, to `name`; it lives for ever. Any thread.
eldr_status eldr_router_get_policy(const struct eldr_router *router, const char **name);

// Says how many requests worker `worker` can hold, and whether any may be sent to it. Any thread.
eldr_status eldr_router_set_worker(struct eldr_router *router, uint32_t worker, uint32_t n_slots, bool is_running);

// Says how many requests worker `worker` holds now, whatever was booked or placed. Any thread.
eldr_status eldr_router_report(struct eldr_router *router, uint32_t worker, uint32_t n_inflight);

// Takes a place on worker `worker` that no decision booked. Any thread.
//
// ELDR_STATUS_FULL if it has none. Errors: ELDR_STATUS_ARGUMENT with `marginal_cost`: eldr_router_place().
eldr_status eldr_router_book(struct eldr_router *router, uint32_t worker);

// Gives back a place on worker `worker`: the request ended, or never got there. Any thread.
//
// Errors: ELDR_STATUS_ARGUMENT if the worker holds nothing, and with `marginal_cost`: eldr_router_leave().
eldr_status eldr_router_unbook(struct eldr_router *router, uint32_t worker);

// Chooses a worker for a request and fills `out`, whose `size` is set. With `book`, a place on it is taken, in one step
// with the choice, so that several threads may route at once. Any thread.
//
// `signature` may be NULL (a request without one goes by load), and so may `domain`, a label for the `domain` policy.
// ELDR_STATUS_FULL if every running worker is full, ELDR_STATUS_NO_WORKER if none is running.
// Errors: ELDR_STATUS_MISMATCH for a signature of another calibration, ELDR_STATUS_ARGUMENT for `book` with
// `marginal_cost`, which has to know the request: eldr_router_route_request().
eldr_status eldr_router_route(struct eldr_router *router,
                              const struct eldr_signature *signature,
                              const char *domain,
                              bool book,
                              struct eldr_decision *out);

// Frees the handle; NULL is let pass. Any thread.
eldr_status eldr_router_free(struct eldr_router *router);

// Fills `request`, of `size` bytes (sizeof(eldr_route_request)), with the defaults: number 0 and nothing known of it. Any
// thread.
eldr_status eldr_route_request_init(struct eldr_route_request *request,
                                    size_t size);

// Like eldr_router_route(), for a request that the router is to know by its number. With `place` it is placed on the
// worker in one step with the choice, until eldr_router_leave(). Any thread.
//
// ELDR_STATUS_FULL if every running worker is full, ELDR_STATUS_NO_WORKER if none is running.
// Errors: ELDR_STATUS_ARGUMENT for a number that is placed, ELDR_STATUS_MISMATCH for a signature or counts of another
// calibration than the router's, ELDR_STATUS_TAP if the layers have counted different tokens.
eldr_status eldr_router_route_request(struct eldr_router *router,
                                      const struct eldr_route_request *request,
                                      bool place,
                                      struct eldr_decision *out);

// Places a request on worker `worker`, which no decision chose. Any thread.
//
// ELDR_STATUS_FULL if it has no place. Errors: as eldr_router_route_request().
eldr_status eldr_router_place(struct eldr_router *router, uint32_t worker, const struct eldr_route_request *request);

// Says that request `id` has left the worker it was placed on: it ended, or never got there. Any thread.
//
// Errors: ELDR_STATUS_ARGUMENT for a request that is not placed.
eldr_status eldr_router_leave(struct eldr_router *router, uint64_t id);

// Says that worker `worker` ran a decode step of `n_batch` sequences that did nothing else, in `time`, of any one unit:
// `marginal_cost` learns from it what a step costs. Other policies do without. Any thread.
//
// Errors: ELDR_STATUS_ARGUMENT for a time that is not above 0, and for a step of no sequence.
eldr_status eldr_router_step(struct eldr_router *router, uint32_t worker, uint32_t n_batch, double time);

// Fills `params`, of `size` bytes (sizeof(eldr_engine_params)), with the defaults; the model is the host's. Any thread.
eldr_status eldr_engine_default_params(struct eldr_engine_params *params, size_t size);

// Loads a model and starts its workers; opens the engine in `out`, which the caller frees. Takes as long as loading
// takes. Any thread.
//
// Errors: ELDR_STATUS_CONFIG with every mistake in the settings, one a line, a calibration that is not there among them;
// ELDR_STATUS_CALIBRATION or ELDR_STATUS_FILE for the calibration, ELDR_STATUS_LLAMA for the model, ELDR_STATUS_UNSUPPORTED in a library without llama.cpp.
eldr_status eldr_engine_open(const struct eldr_engine_params *params,
                             struct eldr_engine **out);

// Copies the tokens of `text`, `n_text` bytes of UTF-8, as a prompt with its special tokens, to `tokens`, which has room
// for `room`; writes to `n`, unless it is NULL, how many there are. Any thread.
//
// Errors: ELDR_STATUS_BUFFER for too little room: `n_text` + 8 is enough for all but odd vocabularies.
eldr_status eldr_engine_tokenize(const struct eldr_engine *engine,
                                 const char *text,
                                 size_t n_text,
                                 int32_t *tokens,
                                 size_t room,
                                 size_t *n);

// Writes what the engine is doing, as a JSON object, to `json`: the tokens of a slot, requests active and waiting, the
// workers and their loads, counters, prompts' beginnings used again, and refits. eldr owns the text; it stays until the
// thread's next call that gives out text. Never waits for a worker. Any thread.
eldr_status eldr_engine_stats_json(const struct eldr_engine *engine, const char **json);

// Takes no more requests and waits up to `timeout_ms` milliseconds until those there are have ended. Any thread; other
// threads go on reading theirs.
//
// ELDR_STATUS_WAIT if some have not ended: call again, or free the engine, which cancels them.
eldr_status eldr_engine_drain(struct eldr_engine *engine, uint32_t timeout_ms);

// Cancels what the engine is doing, stops its workers and frees the handle; NULL is let pass. Requests may be freed
// before or after: their ends can still be read. Any thread, callbacks too.
//
// exit() and the end of main() stop the workers of engines that are still open; end a process by nothing more abrupt, and
// not while an engine is being opened.
eldr_status eldr_engine_free(struct eldr_engine *engine);

// Writes the name of the policy that routes to `name`, which lives for ever, and to `note`, unless that is NULL, why it is
// less than what was asked for, which lives for ever too: NULL where it is not. Any thread.
eldr_status eldr_engine_get_policy(const struct eldr_engine *engine,
                                   const char **name,
                                   const char **note);

// Sends decode worker `worker` no more requests; it finishes those it has, and can be resumed. Any thread.
//
// Errors: ELDR_STATUS_ARGUMENT for a worker that is not there or lost, and for the last one that takes requests.
eldr_status eldr_engine_drain_worker(struct eldr_engine *engine, uint32_t worker);

// Lets a drained decode worker take requests again. Any thread.
//
// Errors: ELDR_STATUS_ARGUMENT for a worker that is not there or lost.
eldr_status eldr_engine_resume_worker(struct eldr_engine *engine, uint32_t worker);

// Routes the requests to come by another calibration of the same model and number of workers; the band keeps its width.
// It may compare other layers, as far as the prefill workers count them: those of the calibration the engine was opened
// with, or every layer under `marginal_cost`. Any thread; the calibration's handle may be freed afterwards.
//
// Errors: ELDR_STATUS_CALIBRATION for one of another model or number of workers, for layers that are not counted, and
// while centroids are refitted.
eldr_status eldr_engine_set_calibration(struct eldr_engine *engine, const struct eldr_calibration *calibration);

// Copies the bytes of `token`'s text, of which several tokens may make one character, to `text`, which has room for
// `room`; writes to `n`, unless it is NULL, how many there are. No NUL is added. Any thread.
//
// Errors: ELDR_STATUS_ARGUMENT for a token that the vocabulary does not have, ELDR_STATUS_BUFFER for too little room.
eldr_status eldr_engine_token_text(const struct eldr_engine *engine,
                                   int32_t token,
                                   uint8_t *text,
                                   size_t room,
                                   size_t *n);

// Fills `params`, of `size` bytes (sizeof(eldr_request_params)), with the defaults: greedy, 128 tokens. Any thread.
eldr_status eldr_request_default_params(struct eldr_request_params *params, size_t size);

// Submits a request and opens it in `out`, which the caller frees; before that or after the engine is freed. Any thread.
//
// With a callback, its first call may come before this returns.
// Errors: ELDR_STATUS_REQUEST if it can not be run as it stands, ELDR_STATUS_QUEUE_FULL, ELDR_STATUS_DRAINING.
eldr_status eldr_engine_submit(struct eldr_engine *engine,
                               const struct eldr_request_params *params,
                               struct eldr_request **out);

// Waits up to `timeout_ms` milliseconds (0 does not wait, below 0 for ever) for the next event of a request without a
// callback and fills `event`, whose `size` is set. Any thread; several that wait for one request take turns.
//
// ELDR_STATUS_WAIT if nothing happened in time, ELDR_STATUS_END once everything was read; `event` tells nothing then, so
// keep what the last one told.
// Errors: ELDR_STATUS_ARGUMENT for a request that has a callback.
eldr_status eldr_request_next(struct eldr_request *request,
                              int64_t timeout_ms,
                              struct eldr_event *event);

// Asks for an early end: what was drawn before and the end still come. Does nothing to a request that has ended. Any
// thread, callbacks too.
eldr_status eldr_request_cancel(const struct eldr_request *request);

// Writes the request's number, unique within its engine, to `id`. Any thread.
eldr_status eldr_request_get_id(const struct eldr_request *request, uint64_t *id);

// Writes why the request went where it went to `json`: an array of its decisions, one for each time that it was routed,
// as far as their events were read or called for. eldr owns the text; it stays until the thread's next call that gives out
// text. Any thread.
eldr_status eldr_request_explain_json(const struct eldr_request *request,
                                      const char **json);

// Cancels the request unless it has ended, and frees the handle; NULL is let pass. Any thread.
//
// When it returns, the request's callback does not run and will not again, so its user data may go. Called from that
// callback itself, this holds from the callback's return on. A thread that waits in eldr_request_next() gets the end.
//
// ELDR_STATUS_WAIT if it is called from a callback that the request's own callback waits for, to free it: the handle is
// freed, but the request's callback runs on until this one returns, so its user data must stay until then.
eldr_status eldr_request_free(struct eldr_request *request);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* ELDR_H */

// Fills an eldr_tensor_layout. ggml.h must be included, that of the ggml the program runs.
#define ELDR_TENSOR_LAYOUT_INIT \
  { sizeof(struct ggml_tensor), offsetof(struct ggml_tensor, type), offsetof(struct ggml_tensor, ne), \
    offsetof(struct ggml_tensor, nb), offsetof(struct ggml_tensor, name), GGML_MAX_NAME, (int32_t) GGML_TYPE_I32 }
