// Loads a model through the C library and writes the first token after a prompt: what tests/peers/first_token.sh times.
//
//   first_token MODEL PROMPT [N_SLOTS N_CTX]
#include <eldr.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failed(void) {
  fprintf(stderr, "%s\n", eldr_last_error());
  return 1;
}

int main(int argc, char **argv) {
  if (argc != 3 && argc != 5) return 2;
  eldr_engine_params params;
  if (eldr_engine_default_params(&params, sizeof params)) return failed();
  params.model = argv[1];
  params.prefill = params.decode = "1@cpu";
  params.n_threads = 1;
  if (argc == 5) {
    params.n_slots = (uint32_t)atoi(argv[3]);
    params.n_ctx_slot = (uint32_t)atoi(argv[4]);
  }
  eldr_engine *engine = NULL;
  if (eldr_engine_open(&params, &engine)) return failed();

  int32_t prompt[512];
  eldr_request_params ask;
  if (eldr_request_default_params(&ask, sizeof ask)) return failed();
  if (eldr_engine_tokenize(engine, argv[2], strlen(argv[2]), prompt, 512, &ask.n_prompt)) return failed();
  ask.prompt = prompt;
  ask.max_tokens = 1;
  eldr_request *request = NULL;
  if (eldr_engine_submit(engine, &ask, &request)) return failed();
  eldr_event event = {.size = sizeof event};
  uint32_t n_generated = 0;
  while (eldr_request_next(request, -1, &event) == ELDR_STATUS_OK) {
    fwrite(event.text, 1, event.n_text, stdout);
    n_generated = event.n_generated;  // the end clears the event
  }
  puts("");
  if (eldr_request_free(request) || eldr_engine_free(engine)) return failed();
  return n_generated == 1 ? 0 : 1;
}
