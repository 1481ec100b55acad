// A program with llama.cpp contexts of its own asks eldr only where a request should be decoded.
//
//   byo_context MODEL CALIBRATION PROMPTS     one prompt a line
//
// Prints what each prompt picked and its signature, as hashes, and the decision. Links eldr's router, which has no
// llama.cpp in it: the tap is a callback of the context, and reads tensors through the functions it is handed.
#include <ggml-backend.h>
#include <llama.h>

#include <eldr.hpp>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

template <class T> static unsigned long long fnv(const std::vector<T> &values) {
  unsigned long long hash = 0xcbf29ce484222325ull;
  const auto *bytes = reinterpret_cast<const unsigned char *>(values.data());
  for (std::size_t i = 0; i < values.size() * sizeof(T); i++) hash = (hash ^ bytes[i]) * 0x100000001b3ull;
  return hash;
}

static eldr::tap open_tap(const eldr::calibration &calibration) {
  eldr_tap_params params = eldr::tap_params();
  params.calibration = calibration.get();
  // Where the fields of this program's tensors are, and the functions of its ggml.
  params.layout = ELDR_TENSOR_LAYOUT_INIT;
  params.get_name = ggml_get_name;
  params.get_bytes = ggml_nbytes;
  params.tensor_get = ggml_backend_tensor_get;
  return eldr::tap(params);
}

static llama_context *open_context(const char *path, const eldr::tap &tap) {
  llama_model_params model_params = llama_model_default_params();
  model_params.use_extra_bufts = false;
  llama_model *model = llama_model_load_from_file(path, model_params);
  llama_context_params params = llama_context_default_params();
  params.n_ctx = params.n_batch = params.n_ubatch = 512;
  params.n_threads = params.n_threads_batch = 1;
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
  params.cb_eval = eldr_tap_on_node;
  params.cb_eval_user_data = tap.get();
  return model ? llama_init_from_model(model, params) : nullptr;
}

static void serve(llama_context *context, eldr::tap &tap, const eldr::calibration &calibration, std::ifstream prompts) {
  eldr_router_params params = eldr::router_params();
  params.calibration = calibration.get();
  eldr::router router(params);
  eldr::cache cache(calibration);
  for (std::string text; std::getline(prompts, text);) {
    std::vector<llama_token> tokens(text.size() + 8);
    tokens.resize(llama_tokenize(llama_model_get_vocab(llama_get_model(context)), text.data(), (int) text.size(),
                                 tokens.data(), (int) tokens.size(), true, true));
    tap.begin();
    llama_decode(context, llama_batch_get_one(tokens.data(), (int) tokens.size()));
    tap.end(tokens.size()); // throws if a picked expert was missed: after a decode that failed, too

    // By way of the cache, a prompt whose start was in the context already is counted whole.
    cache.add(0, 0, tap, 0, tokens.size());
    eldr::counts counts(calibration);
    cache.counts_of(0, 0, -1, counts);
    std::vector<std::uint32_t> rows;
    for (std::uint32_t layer : calibration.layers())
      for (std::uint32_t n : counts.row(layer, calibration.facts().n_expert)) rows.push_back(n);

    // A server would book the place, and give it back by router.unbook(); here every worker is idle each time.
    const eldr::signature signature(counts);
    eldr_decision decision;
    router.route(signature, decision, false);
    unsigned bits = 0;
    std::memcpy(&bits, &decision.similarity, sizeof bits);
    std::printf("tokens %zu counts %016llx signature %016llx worker %u band %u similarity %08x\n", tokens.size(),
                fnv(rows), fnv(signature.values()), decision.worker, decision.band, bits);
    llama_memory_seq_rm(llama_get_memory(context), 0, -1, -1);
    cache.seq_rm(0, -1, -1);
  }
}

int main(int argc, char **argv) try {
  if (argc != 4) return std::fprintf(stderr, "usage: byo_context MODEL CALIBRATION PROMPTS\n"), 2;
  llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
  const eldr::calibration calibration(argv[2]);
  eldr::tap tap = open_tap(calibration);
  llama_context *context = open_context(argv[1], tap);
  if (!context) return std::fprintf(stderr, "%s could not be loaded\n", argv[1]), 1;
  serve(context, tap, calibration, std::ifstream(argv[3]));
  llama_free(context);
} catch (const eldr::error &error) {
  return std::fprintf(stderr, "eldr: %s\n", error.what()), 1;
}
