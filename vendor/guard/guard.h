// The boundary between Rust and llama.cpp: every call that can throw goes through here, because a C++ exception that
// reaches a Rust frame ends the process. Each function returns an ELDR_GUARD_* code; when it is not ELDR_GUARD_OK, the
// exception's text is in `message` (always terminated, cut at `message_size`) and the out parameters are unset.
#pragma once

#include "llama.h"

#include <stddef.h>
#include <stdint.h>

#define ELDR_GUARD_OK 0
#define ELDR_GUARD_NO_MEMORY 1  // std::bad_alloc
#define ELDR_GUARD_EXCEPTION 2  // any other std::exception
#define ELDR_GUARD_UNKNOWN 3    // something else was thrown
#define ELDR_GUARD_NO_BACKEND 4 // the build has no such ggml backend, or not this function of it

#ifdef __cplusplus
extern "C" {
#endif

// Reads a GGUF file's header. *out is null when ggml refused it (the reason went to the log).
int32_t eldr_guard_gguf_open(const char * path, struct gguf_context ** out, char * message, size_t message_size);

// *out is null when llama.cpp refused the file (the reason went to the log).
int32_t eldr_guard_model_load(const char * path, const struct llama_model_params * params, struct llama_model ** out,
                              char * message, size_t message_size);

// *out is null when llama.cpp refused the parameters (the reason went to the log).
int32_t eldr_guard_context_init(struct llama_model * model, const struct llama_context_params * params,
                                struct llama_context ** out, char * message, size_t message_size);

// *result is llama_decode's return value.
int32_t eldr_guard_decode(struct llama_context * ctx, const struct llama_batch * batch, int32_t * result,
                          char * message, size_t message_size);

// *out is null when batch row `i` has no logits.
int32_t eldr_guard_logits(struct llama_context * ctx, int32_t i, float ** out, char * message, size_t message_size);

int32_t eldr_guard_state_size(struct llama_context * ctx, llama_seq_id seq, size_t * out, char * message,
                              size_t message_size);
int32_t eldr_guard_state_get(struct llama_context * ctx, uint8_t * dst, size_t size, llama_seq_id seq, size_t * out,
                             char * message, size_t message_size);
// *out is 0 when the state was refused (the reason went to the log).
int32_t eldr_guard_state_set(struct llama_context * ctx, const uint8_t * src, size_t size, llama_seq_id seq,
                             size_t * out, char * message, size_t message_size);

int32_t eldr_guard_seq_rm(struct llama_context * ctx, llama_seq_id seq, llama_pos p0, llama_pos p1, bool * out,
                          char * message, size_t message_size);
// Both sequences must be in one stream: between streams llama.cpp asserts on a partial range and copies later.
int32_t eldr_guard_seq_share(struct llama_context * ctx, llama_seq_id src, llama_seq_id dst, char * message,
                             size_t message_size);

// *result is llama_tokenize's return value.
int32_t eldr_guard_tokenize(const struct llama_vocab * vocab, const char * text, int32_t text_len, llama_token * tokens,
                            int32_t n_tokens_max, bool add_special, bool parse_special, int32_t * result,
                            char * message, size_t message_size);

// *result is llama_token_to_piece's return value.
int32_t eldr_guard_piece(const struct llama_vocab * vocab, llama_token token, char * buf, int32_t size, bool special,
                         int32_t * result, char * message, size_t message_size);

// *result is llama_chat_apply_template's return value; negative when llama.cpp does not know the template.
int32_t eldr_guard_chat(const char * tmpl, const struct llama_chat_message * chat, size_t n_messages, bool add_assistant,
                        char * buf, int32_t size, int32_t * result, char * message, size_t message_size);

// How logits are changed before a token is drawn. A neutral value leaves its step out of the chain.
struct eldr_guard_sampling {
    int32_t penalty_last_n;  // 0: no penalties
    float   penalty_repeat;  // 1: off
    float   penalty_freq;    // 0: off
    float   penalty_present; // 0: off
    int32_t top_k;           // 0: all
    float   top_p;           // 1: all
    float   min_p;           // 0: all
    float   temperature;     // 0 or 1: unchanged
    const char * grammar;      // GBNF, or null
    const char * grammar_root; // its start symbol, or null
};

// The chain: grammar, penalties, top-k, top-p, min-p, temperature. *out is null when the grammar does not parse.
int32_t eldr_guard_sampler_init(const struct llama_vocab * vocab, const struct eldr_guard_sampling * params,
                                struct llama_sampler ** out, char * message, size_t message_size);
int32_t eldr_guard_sampler_apply(struct llama_sampler * chain, llama_token_data_array * candidates, char * message,
                                 size_t message_size);
int32_t eldr_guard_sampler_accept(struct llama_sampler * chain, llama_token token, char * message, size_t message_size);

// The devices of an RPC server, at most `n_max` of them into `devices`; *out is how many it has, 0 when it did not
// answer. They are not registered, so nothing uses them that was not given them. ggml keeps them for ever.
int32_t eldr_guard_rpc_add(const char * endpoint, ggml_backend_dev_t * devices, size_t n_max, size_t * out,
                           char * message, size_t message_size);

// Serves a device to others over RPC. Returns only when the server cannot go on.
int32_t eldr_guard_rpc_serve(const char * endpoint, size_t n_threads, ggml_backend_dev_t device, char * message,
                             size_t message_size);

// Bytes of one kind of buffer of a context made without allocating (llama_model_params.no_alloc).
struct eldr_guard_memory {
    ggml_backend_dev_t device; // null: the host's
    bool   is_host;
    size_t model;   // weights
    size_t context; // keys and values
    size_t compute; // intermediate results
};

// What a context and its model would take, at most `n_max` rows; *out is how many there are.
int32_t eldr_guard_memory_of(const struct llama_context * ctx, struct eldr_guard_memory * rows, size_t n_max,
                             size_t * out, char * message, size_t message_size);

// The host's processors and memory as a buffer type; null without a CPU backend.
ggml_backend_buffer_type_t eldr_guard_host_buffers(void);

// Gives a context threads of its own: `n_threads`, on the processors whose numbers are in `cpus`. The pool is paused
// until the first batch, whose thread becomes one of it. *out is the pool, to be freed after the context.
int32_t eldr_guard_threads_attach(struct llama_context * ctx, const uint32_t * cpus, size_t n_cpus, int32_t n_threads,
                                  ggml_threadpool_t * out, char * message, size_t message_size);
void eldr_guard_threads_free(ggml_threadpool_t pool);

#ifdef __cplusplus
}
#endif
