// Serves a model from C: opens an engine, submits two prompts at once, prints their texts and where they were decoded.
//
//   embed [MODEL] [CALIBRATION]
#include <eldr.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void check(eldr_status status) {
  if (status < 100) return;
  fprintf(stderr, "%s: %s\n", eldr_status_name(status), eldr_last_error());
  exit(1);
}

static eldr_request *submit(eldr_engine *engine, const char *text) {
  const size_t room = strlen(text) + 8;
  int32_t *tokens = malloc(room * sizeof *tokens);
  eldr_request_params params;
  check(eldr_request_default_params(&params, sizeof params));
  check(eldr_engine_tokenize(engine, text, strlen(text), tokens, room, &params.n_prompt));
  params.prompt = tokens;
  params.max_tokens = 32;
  params.temperature = 0.7f;
  params.seed = 1;
  eldr_request *request = NULL;
  check(eldr_engine_submit(engine, &params, &request));
  free(tokens);
  return request;
}

static void print(eldr_request *request) {
  eldr_event event;
  event.size = sizeof event;
  while (eldr_request_next(request, -1, &event) == ELDR_STATUS_OK) {
    switch (event.kind) {
    case ELDR_EVENT_KIND_TOKEN: fwrite(event.text, 1, event.n_text, stdout); break;
    case ELDR_EVENT_KIND_ROUTED: printf("[worker %u, %s] ", event.decision->worker, event.decision->reason); break;
    case ELDR_EVENT_KIND_END: printf("%s\n[%u tokens]\n", event.text, event.n_generated); break;
    default: printf("[failed: %s]\n", event.text); break;
    }
    fflush(stdout);
  }
  check(eldr_request_free(request));
}

int main(int argc, char **argv) {
  eldr_engine_params params;
  check(eldr_engine_default_params(&params, sizeof params));
  params.model = argc > 1 ? argv[1] : "examples/data/tiny-moe-64x4.gguf";
  params.calibration = argc > 2 ? argv[2] : NULL;
  params.decode = argc > 2 ? "4" : "2";
  params.n_slots = 4;

  eldr_engine *engine = NULL;
  check(eldr_engine_open(&params, &engine));
  eldr_request *code = submit(engine, "def read_lines(path):");
  eldr_request *math = submit(engine, "Exercise: Compute the digits of 619 in base 3.");
  print(code);
  print(math);

  const char *stats = NULL;
  check(eldr_engine_stats_json(engine, &stats));
  printf("%s\n", stats);
  check(eldr_engine_drain(engine, 1000));
  check(eldr_engine_free(engine));
  return 0;
}
