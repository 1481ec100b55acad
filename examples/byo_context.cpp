// A program with llama.cpp contexts of its own asks eldr only where a request should be decoded.
//
//   byo_context MODEL CALIBRATION PROMPTS     one prompt a line
//
// Prints, for each prompt, what it picked (as hashes), its signature and the decision. Links eldr's router, which has no
// llama.cpp in it: the tap is a callback of the context, and reads tensors through the functions it is handed.
#include <ggml-backend.h>
#include <llama.h>

#include <eldr.hpp>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

template <class T> static unsigned long long fnv(const std::vector<T> &values, unsigned long long hash) {
  for (const T &value : values) {
    unsigned char bytes[sizeof(T)];
    std::memcpy(bytes, &value, sizeof(T));
    for (unsigned char byte : bytes) hash = (hash ^ byte) * 0x100000001b3ull;
  }
  return hash;
}

static const unsigned long long FNV = 0xcbf29ce484222325ull;
static const int N_CTX = 512;

static int serve(const char *model_path, const char *calibration_path, const char *prompts_path) {
  const eldr::calibration calibration(calibration_path);
  const eldr_calibration_facts facts = calibration.facts();

  // The tap: where the fields of this program's tensors are, and its ggml's functions.
  eldr_tap_params tap_params = eldr::tap_params();
  tap_params.calibration = calibration.get();
  tap_params.layout = ELDR_TENSOR_LAYOUT_INIT;
  tap_params.get_name = ggml_get_name;
  tap_params.get_bytes = ggml_nbytes;
  tap_params.tensor_get = ggml_backend_tensor_get;
  eldr::tap tap(tap_params);

  llama_model_params model_params = llama_model_default_params();
  model_params.use_extra_bufts = false;
  llama_model *model = llama_model_load_from_file(model_path, model_params);
  llama_context_params params = llama_context_default_params();
  params.n_ctx = 2 * N_CTX;
  params.n_seq_max = 2;
  params.n_batch = params.n_ubatch = N_CTX;
  params.n_threads = params.n_threads_batch = 1;
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
  params.cb_eval = eldr_tap_on_node;
  params.cb_eval_user_data = tap.get();
  llama_context *context = model ? llama_init_from_model(model, params) : nullptr;
  if (!context) return std::fprintf(stderr, "cannot load %s\n", model_path), 1;

  eldr_router_params router_params = eldr::router_params();
  router_params.calibration = calibration.get();
  eldr::router router(router_params);
  eldr::cache cache(calibration);

  std::ifstream prompts(prompts_path);
  for (std::string text; std::getline(prompts, text);) {
    std::vector<llama_token> tokens(text.size() + 8);
    tokens.resize(llama_tokenize(llama_model_get_vocab(model), text.data(), (int) text.size(), tokens.data(),
                                 (int) tokens.size(), true, true));
    tap.begin();
    if (llama_decode(context, llama_batch_get_one(tokens.data(), (int) tokens.size())) != 0) return 1;
    tap.end(tokens.size());

    // What the cache has of sequence 0 is this prompt: by way of it, a prompt whose start was there counts whole, too.
    cache.add(0, 0, tap, 0, tokens.size());
    eldr::counts counts(calibration);
    cache.counts_of(0, 0, -1, counts);
    const eldr::signature signature(counts);
    unsigned long long hash = FNV;
    for (std::uint32_t layer : calibration.layers()) hash = fnv(counts.row(layer, facts.n_expert), hash);

    // A server would book the place and give it back by router.unbook(); here every worker is idle again at once.
    eldr_decision decision;
    if (router.route(signature, decision, false) != ELDR_STATUS_OK) return 1;
    unsigned bits = 0;
    std::memcpy(&bits, &decision.similarity, sizeof bits);
    std::printf("tokens %zu counts %016llx signature %016llx worker %u band %u similarity %08x\n", tokens.size(), hash,
                fnv(signature.values(), FNV), decision.worker, decision.band, bits);

    llama_memory_seq_rm(llama_get_memory(context), 0, -1, -1);
    cache.seq_rm(0, -1, -1);
  }
  llama_free(context);
  llama_model_free(model);
  return 0;
}

int main(int argc, char **argv) {
  if (argc != 4) return std::fprintf(stderr, "usage: byo_context MODEL CALIBRATION PROMPTS\n"), 2;
  llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
  try {
    return serve(argv[1], argv[2], argv[3]);
  } catch (const eldr::error &error) {
    return std::fprintf(stderr, "eldr: %s\n", error.what()), 1;
  }
}
