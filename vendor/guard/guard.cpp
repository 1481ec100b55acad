#include "guard.h"

#include <cstdio>
#include <exception>
#include <map>
#include <new>
#include <string>

// Exported by llama.cpp, but declared in a header that is not installed (src/llama-ext.h of the pinned version).
struct llama_memory_breakdown_data {
    size_t model   = 0;
    size_t context = 0;
    size_t compute = 0;
};
std::map<ggml_backend_buffer_type_t, llama_memory_breakdown_data> llama_get_memory_breakdown(const llama_context * ctx);

namespace {

void say(char * message, size_t size, const char * text) noexcept {
    if (message != nullptr && size > 0) {
        snprintf(message, size, "%s", text);
    }
}

template <typename F> int32_t guarded(char * message, size_t size, F && body) noexcept {
    try {
        return body();
    } catch (const std::bad_alloc & e) {
        say(message, size, e.what());
        return ELDR_GUARD_NO_MEMORY;
    } catch (const std::exception & e) {
        say(message, size, e.what());
        return ELDR_GUARD_EXCEPTION;
    } catch (...) {
        say(message, size, "an exception of unknown type");
        return ELDR_GUARD_UNKNOWN;
    }
}

struct sampler_deleter {
    llama_sampler * chain;
    ~sampler_deleter() {
        if (chain != nullptr) {
            llama_sampler_free(chain);
        }
    }
};

void add(llama_sampler * chain, llama_sampler * step) {
    if (step == nullptr) {
        throw std::bad_alloc();
    }
    llama_sampler_chain_add(chain, step);
}

// The RPC backend has no bindings: its functions are found by name, so that a build without it still links.
void * rpc_function(const char * name) {
    ggml_backend_reg_t reg = ggml_backend_reg_by_name("RPC");
    return reg == nullptr ? nullptr : ggml_backend_reg_get_proc_address(reg, name);
}

using rpc_add_fn   = ggml_backend_reg_t (*)(const char *);
using rpc_serve_fn = void (*)(const char *, const char *, size_t, size_t, ggml_backend_dev_t *);

// Found by name too: the CPU backend may be a library that is loaded at run time.
void * cpu_function(const char * name) {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    return cpu == nullptr ? nullptr : ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu), name);
}

using threads_new_fn  = ggml_threadpool_t (*)(ggml_threadpool_params *);
using threads_free_fn = void (*)(ggml_threadpool_t);

} // namespace

extern "C" {

int32_t eldr_guard_gguf_open(const char * path, gguf_context ** out, char * message, size_t message_size) {
    return guarded(message, message_size, [&] {
        *out = gguf_init_from_file(path, gguf_init_params { /*.no_alloc =*/ true, /*.ctx =*/ nullptr });
        return ELDR_GUARD_OK;
    });
}

int32_t eldr_guard_model_load(const char * path, const llama_model_params * params, llama_model ** out, char * message,
                              size_t message_size) {
    return guarded(message, message_size, [&] {
        *out = llama_model_load_from_file(path, *params);
        return ELDR_GUARD_OK;
    });
}

int32_t eldr_guard_context_init(llama_model * model, const llama_context_params * params, llama_context ** out,
                                char * message, size_t message_size) {
    return guarded(message, message_size, [&] {
        *out = llama_init_from_model(model, *params);
        return ELDR_GUARD_OK;
    });
}

int32_t eldr_guard_decode(llama_context * ctx, const llama_batch * batch, int32_t * result, char * message,
                          size_t message_size) {
    return guarded(message, message_size, [&] {
        *result = llama_decode(ctx, *batch);
        return ELDR_GUARD_OK;
    });
}

int32_t eldr_guard_logits(llama_context * ctx, int32_t i, float ** out, char * message, size_t message_size) {
    return guarded(message, message_size, [&] {
        *out = llama_get_logits_ith(ctx, i);
        return ELDR_GUARD_OK;
    });
}

int32_t eldr_guard_state_size(llama_context * ctx, llama_seq_id seq, size_t * out, char * message,
                              size_t message_size) {
    return guarded(message, message_size, [&] {
        *out = llama_state_seq_get_size(ctx, seq);
        return ELDR_GUARD_OK;
    });
}

int32_t eldr_guard_state_get(llama_context * ctx, uint8_t * dst, size_t size, llama_seq_id seq, size_t * out,
                             char * message, size_t message_size) {
    return guarded(message, message_size, [&] {
        *out = llama_state_seq_get_data(ctx, dst, size, seq);
        return ELDR_GUARD_OK;
    });
}

int32_t eldr_guard_state_set(llama_context * ctx, const uint8_t * src, size_t size, llama_seq_id seq, size_t * out,
                             char * message, size_t message_size) {
    return guarded(message, message_size, [&] {
        *out = llama_state_seq_set_data(ctx, src, size, seq);
        return ELDR_GUARD_OK;
    });
}

int32_t eldr_guard_seq_rm(llama_context * ctx, llama_seq_id seq, llama_pos p0, llama_pos p1, bool * out, char * message,
                          size_t message_size) {
    return guarded(message, message_size, [&] {
        *out = llama_memory_seq_rm(llama_get_memory(ctx), seq, p0, p1);
        return ELDR_GUARD_OK;
    });
}

int32_t eldr_guard_seq_share(llama_context * ctx, llama_seq_id src, llama_seq_id dst, char * message,
                             size_t message_size) {
    return guarded(message, message_size, [&] {
        llama_memory_seq_cp(llama_get_memory(ctx), src, dst, -1, -1);
        return ELDR_GUARD_OK;
    });
}

int32_t eldr_guard_tokenize(const llama_vocab * vocab, const char * text, int32_t text_len, llama_token * tokens,
                            int32_t n_tokens_max, bool add_special, bool parse_special, int32_t * result,
                            char * message, size_t message_size) {
    return guarded(message, message_size, [&] {
        *result = llama_tokenize(vocab, text, text_len, tokens, n_tokens_max, add_special, parse_special);
        return ELDR_GUARD_OK;
    });
}

int32_t eldr_guard_piece(const llama_vocab * vocab, llama_token token, char * buf, int32_t size, bool special,
                         int32_t * result, char * message, size_t message_size) {
    return guarded(message, message_size, [&] {
        *result = llama_token_to_piece(vocab, token, buf, size, 0, special);
        return ELDR_GUARD_OK;
    });
}

int32_t eldr_guard_chat(const char * tmpl, const llama_chat_message * chat, size_t n_messages, bool add_assistant,
                        char * buf, int32_t size, int32_t * result, char * message, size_t message_size) {
    return guarded(message, message_size, [&] {
        *result = llama_chat_apply_template(tmpl, chat, n_messages, add_assistant, buf, size);
        return ELDR_GUARD_OK;
    });
}

int32_t eldr_guard_sampler_init(const llama_vocab * vocab, const eldr_guard_sampling * params, llama_sampler ** out,
                                char * message, size_t message_size) {
    return guarded(message, message_size, [&] {
        llama_sampler_chain_params chain_params = llama_sampler_chain_default_params();
        chain_params.no_perf = true;
        sampler_deleter owner { llama_sampler_chain_init(chain_params) };
        llama_sampler * chain = owner.chain;
        if (params->grammar != nullptr) {
            llama_sampler * grammar = llama_sampler_init_grammar(vocab, params->grammar, params->grammar_root);
            if (grammar == nullptr) {
                *out = nullptr;
                return ELDR_GUARD_OK;
            }
            add(chain, grammar);
        }
        const bool penalties =
            params->penalty_repeat != 1.0f || params->penalty_freq != 0.0f || params->penalty_present != 0.0f;
        if (params->penalty_last_n > 0 && penalties) {
            add(chain, llama_sampler_init_penalties(llama_vocab_n_tokens(vocab), params->penalty_last_n,
                                                    params->penalty_repeat, params->penalty_freq,
                                                    params->penalty_present));
        }
        if (params->top_k > 0) {
            add(chain, llama_sampler_init_top_k(params->top_k));
        }
        if (params->top_p < 1.0f) {
            add(chain, llama_sampler_init_top_p(params->top_p, 1));
        }
        if (params->min_p > 0.0f) {
            add(chain, llama_sampler_init_min_p(params->min_p, 1));
        }
        if (params->temperature > 0.0f && params->temperature != 1.0f) {
            add(chain, llama_sampler_init_temp(params->temperature));
        }
        owner.chain = nullptr;
        *out = chain;
        return ELDR_GUARD_OK;
    });
}

int32_t eldr_guard_sampler_apply(llama_sampler * chain, llama_token_data_array * candidates, char * message,
                                 size_t message_size) {
    return guarded(message, message_size, [&] {
        llama_sampler_apply(chain, candidates);
        return ELDR_GUARD_OK;
    });
}

int32_t eldr_guard_sampler_accept(llama_sampler * chain, llama_token token, char * message, size_t message_size) {
    return guarded(message, message_size, [&] {
        llama_sampler_accept(chain, token);
        return ELDR_GUARD_OK;
    });
}

int32_t eldr_guard_rpc_add(const char * endpoint, ggml_backend_dev_t * devices, size_t n_max, size_t * out,
                           char * message, size_t message_size) {
    return guarded(message, message_size, [&]() -> int32_t {
        const auto add_server = reinterpret_cast<rpc_add_fn>(rpc_function("ggml_backend_rpc_add_server"));
        if (add_server == nullptr) {
            return ELDR_GUARD_NO_BACKEND;
        }
        ggml_backend_reg_t reg = add_server(endpoint);
        *out = reg == nullptr ? 0 : ggml_backend_reg_dev_count(reg);
        for (size_t i = 0; i < *out && i < n_max; ++i) {
            devices[i] = ggml_backend_reg_dev_get(reg, i);
        }
        return ELDR_GUARD_OK;
    });
}

int32_t eldr_guard_rpc_serve(const char * endpoint, size_t n_threads, ggml_backend_dev_t device, char * message,
                             size_t message_size) {
    return guarded(message, message_size, [&]() -> int32_t {
        const auto serve = reinterpret_cast<rpc_serve_fn>(rpc_function("ggml_backend_rpc_start_server"));
        if (serve == nullptr) {
            return ELDR_GUARD_NO_BACKEND;
        }
        serve(endpoint, nullptr, n_threads, 1, &device);
        return ELDR_GUARD_OK;
    });
}

int32_t eldr_guard_memory_of(const llama_context * ctx, eldr_guard_memory * rows, size_t n_max, size_t * out,
                             char * message, size_t message_size) {
    return guarded(message, message_size, [&]() -> int32_t {
        *out = 0;
        for (const auto & [type, bytes] : llama_get_memory_breakdown(ctx)) {
            if (*out < n_max) {
                rows[*out] = { ggml_backend_buft_get_device(type), ggml_backend_buft_is_host(type), bytes.model,
                               bytes.context, bytes.compute };
            }
            ++*out;
        }
        return ELDR_GUARD_OK;
    });
}

ggml_backend_buffer_type_t eldr_guard_host_buffers(void) {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    return cpu == nullptr ? nullptr : ggml_backend_dev_buffer_type(cpu);
}

int32_t eldr_guard_threads_attach(llama_context * ctx, const uint32_t * cpus, size_t n_cpus, int32_t n_threads,
                                  ggml_threadpool_t * out, char * message, size_t message_size) {
    return guarded(message, message_size, [&]() -> int32_t {
        const auto make = reinterpret_cast<threads_new_fn>(cpu_function("ggml_threadpool_new"));
        if (make == nullptr) {
            return ELDR_GUARD_NO_BACKEND;
        }
        ggml_threadpool_params params = ggml_threadpool_params_default(n_threads);
        for (size_t i = 0; i < n_cpus; ++i) {
            if (cpus[i] < GGML_MAX_N_THREADS) {
                params.cpumask[cpus[i]] = true;
            }
        }
        // Otherwise the calling thread is pinned here and now.
        params.paused = true;
        *out = make(&params);
        if (*out == nullptr) {
            throw std::bad_alloc();
        }
        llama_attach_threadpool(ctx, *out, *out);
        return ELDR_GUARD_OK;
    });
}

void eldr_guard_threads_free(ggml_threadpool_t pool) {
    const auto release = reinterpret_cast<threads_free_fn>(cpu_function("ggml_threadpool_free"));
    if (release != nullptr) {
        release(pool);
    }
}

} // extern "C"
