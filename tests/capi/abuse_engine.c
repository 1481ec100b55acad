// The engine's half of the misuse: requests, callbacks, and handles freed while they stream.
// For nanosleep.
#define _POSIX_C_SOURCE 200809L
#include "abuse.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

static void wait_a_little(void) {
  const struct timespec moment = {.tv_nsec = 2000000};
  nanosleep(&moment, NULL);
}

static atomic_int n_lines;
static atomic_int refused;

static void on_line(int32_t level, const char *text, void *user) {
  (void) user;
  if (level >= 1 && level <= 5 && text[0] != '\0') atomic_fetch_add(&n_lines, 1);
  eldr_router *router = NULL;
  if (eldr_router_open(NULL, &router) == ELDR_STATUS_REENTRANT) atomic_store(&refused, 1);
}

struct listener {
  eldr_engine *engine;
  atomic_int n_tokens;
  atomic_int n_ends;
  atomic_int n_after;
  atomic_int is_done;
  int mode;
};

enum { COUNT, CANCEL_ITSELF, STOP, FREE_ITSELF, FREE_ENGINE };

static bool on_event(eldr_request *request, const eldr_event *event, void *user) {
  struct listener *listener = user;
  if (atomic_load(&listener->is_done)) atomic_fetch_add(&listener->n_after, 1);
  if (event->kind == ELDR_EVENT_KIND_END || event->kind == ELDR_EVENT_KIND_FAILED) {
    atomic_fetch_add(&listener->n_ends, 1);
    return true;
  }
  if (event->kind != ELDR_EVENT_KIND_TOKEN || atomic_fetch_add(&listener->n_tokens, 1) + 1 != 3) return true;
  switch (listener->mode) {
  case CANCEL_ITSELF: EXPECT(eldr_request_cancel(request), ELDR_STATUS_OK); return true;
  case STOP: atomic_store(&listener->is_done, 1); return false;
  case FREE_ITSELF:
    EXPECT(eldr_request_free(request), ELDR_STATUS_OK);
    EXPECT(eldr_request_free(request), ELDR_STATUS_HANDLE);
    atomic_store(&listener->is_done, 1);
    return true;
  case FREE_ENGINE: EXPECT(eldr_engine_free(listener->engine), ELDR_STATUS_OK); return true;
  default: return true;
  }
}

static eldr_engine *open_engine(const char *model) {
  eldr_engine_params params;
  EXPECT(eldr_engine_default_params(&params, sizeof params), ELDR_STATUS_OK);
  params.model = model;
  params.prefill = "1@cpu";
  params.decode = "1@cpu";
  params.n_threads = 1;
  params.n_slots = 4;
  params.n_ctx_slot = 256;
  params.chunk = 64;
  eldr_engine *engine = NULL;
  EXPECT(eldr_engine_open(&params, &engine), ELDR_STATUS_OK);
  return engine;
}

static eldr_request_params ask(const int32_t *prompt, size_t n_prompt, uint32_t max_tokens) {
  eldr_request_params params;
  EXPECT(eldr_request_default_params(&params, sizeof params), ELDR_STATUS_OK);
  params.prompt = prompt;
  params.n_prompt = n_prompt;
  params.max_tokens = max_tokens;
  params.ignore_eos = 1;
  return params;
}

static eldr_finish read_to_end(eldr_request *request, int *n_tokens) {
  eldr_event event = {.size = sizeof event};
  *n_tokens = 0;
  while (eldr_request_next(request, 600000, &event) == ELDR_STATUS_OK) {
    *n_tokens += event.kind == ELDR_EVENT_KIND_TOKEN;
    if (event.kind == ELDR_EVENT_KIND_END) return event.finish;
    if (event.kind == ELDR_EVENT_KIND_FAILED) break;
  }
  return ELDR_FINISH_NONE;
}

static void *wait_for_end(void *arg) {
  int n_tokens = 0;
  read_to_end(arg, &n_tokens);
  return NULL;
}

static void asked_requests(eldr_engine *engine, const int32_t *prompt, size_t n_prompt) {
  eldr_request_params params = ask(prompt, n_prompt, 8);
  eldr_request *request = NULL;
  int n_tokens = 0;
  EXPECT(eldr_engine_submit(engine, &params, NULL), ELDR_STATUS_NULL);
  EXPECT(eldr_engine_submit(engine, &params, &request), ELDR_STATUS_OK);
  EXPECT_TRUE(read_to_end(request, &n_tokens) == ELDR_FINISH_LENGTH && n_tokens == 8);
  eldr_event event = {.size = sizeof event};
  EXPECT(eldr_request_next(request, 0, &event), ELDR_STATUS_END);
  event.size = 1;
  EXPECT(eldr_request_next(request, 0, &event), ELDR_STATUS_STRUCT_SIZE);
  EXPECT(eldr_request_next(request, 0, NULL), ELDR_STATUS_NULL);
  EXPECT(eldr_request_cancel(request), ELDR_STATUS_OK);
  const char *json = NULL;
  EXPECT(eldr_request_explain_json(request, NULL), ELDR_STATUS_NULL);
  EXPECT(eldr_request_explain_json(request, &json), ELDR_STATUS_OK);
  EXPECT_TRUE(json != NULL && strstr(json, "\"reason\":\"load\"") != NULL);
  EXPECT(eldr_request_free(request), ELDR_STATUS_OK);
  EXPECT(eldr_request_next(request, 0, &event), ELDR_STATUS_HANDLE);
  EXPECT(eldr_request_explain_json(request, &json), ELDR_STATUS_HANDLE);

  params.max_tokens = 0;
  EXPECT(eldr_engine_submit(engine, &params, &request), ELDR_STATUS_REQUEST);
  params.max_tokens = 8;
  params.n_prompt = 0;
  EXPECT(eldr_engine_submit(engine, &params, &request), ELDR_STATUS_REQUEST);
  params.n_prompt = n_prompt;
  params.temperature = NAN;
  EXPECT(eldr_engine_submit(engine, &params, &request), ELDR_STATUS_REQUEST);
  const int32_t unknown = -5;
  params = ask(&unknown, 1, 8);
  EXPECT(eldr_engine_submit(engine, &params, &request), ELDR_STATUS_REQUEST);

  // Biased, with log probabilities, before others.
  const eldr_logit_bias bias[1] = {{prompt[0], -INFINITY}};
  params = ask(prompt, n_prompt, 3);
  params.logit_bias = bias;
  params.n_logit_bias = 1;
  params.n_logprobs = 4;
  params.is_urgent = 1;
  EXPECT(eldr_engine_submit(engine, &params, &request), ELDR_STATUS_OK);
  event.size = sizeof event;
  while (eldr_request_next(request, 600000, &event) == ELDR_STATUS_OK) {
    const bool is_token = event.kind == ELDR_EVENT_KIND_TOKEN;
    EXPECT_TRUE(!is_token || (event.logprob <= 0 && event.n_top == 4 && event.top[0].logprob >= event.top[3].logprob));
    EXPECT_TRUE(is_token || (isnan(event.logprob) && event.n_top == 0 && event.top == NULL));
    EXPECT_TRUE((event.kind == ELDR_EVENT_KIND_ROUTED) == (event.decision != NULL));
    EXPECT_TRUE(!is_token || event.token != prompt[0]);
  }
  EXPECT(eldr_request_free(request), ELDR_STATUS_OK);
  params.logit_bias = NULL;
  EXPECT(eldr_engine_submit(engine, &params, &request), ELDR_STATUS_NULL);
  params.n_logit_bias = 0;
  params.grammar = "not a grammar";
  EXPECT(eldr_engine_submit(engine, &params, &request), ELDR_STATUS_OK);
  EXPECT_TRUE(read_to_end(request, &n_tokens) == ELDR_FINISH_NONE);
  EXPECT(eldr_request_free(request), ELDR_STATUS_OK);

  // A stop string that the text has; one that is none.
  params = ask(prompt, n_prompt, 60);
  const char *stops[2] = {"never there", " "};
  params.stop = stops;
  params.n_stop = 2;
  EXPECT(eldr_engine_submit(engine, &params, &request), ELDR_STATUS_OK);
  EXPECT_TRUE(read_to_end(request, &n_tokens) == ELDR_FINISH_STOP && n_tokens < 60);
  EXPECT(eldr_request_free(request), ELDR_STATUS_OK);
  stops[1] = "";
  EXPECT(eldr_engine_submit(engine, &params, &request), ELDR_STATUS_ARGUMENT);
  stops[1] = NULL;
  EXPECT(eldr_engine_submit(engine, &params, &request), ELDR_STATUS_NULL);

  // A thread that waits while the request is freed under it gets the end; others get a status.
  params = ask(prompt, n_prompt, 200);
  EXPECT(eldr_engine_submit(engine, &params, &request), ELDR_STATUS_OK);
  pthread_t waiting[3];
  for (int i = 0; i < 3; i++) pthread_create(&waiting[i], NULL, wait_for_end, request);
  EXPECT(eldr_request_free(request), ELDR_STATUS_OK);
  for (int i = 0; i < 3; i++) pthread_join(waiting[i], NULL);
}

static void called_requests(eldr_engine *engine, const int32_t *prompt, size_t n_prompt) {
  for (int mode = COUNT; mode <= FREE_ITSELF; mode++) {
    struct listener listener = {.engine = engine, .mode = mode};
    eldr_request_params params = ask(prompt, n_prompt, 40);
    params.on_event = on_event;
    params.user = &listener;
    eldr_request *request = NULL;
    EXPECT(eldr_engine_submit(engine, &params, &request), ELDR_STATUS_OK);
    eldr_event event = {.size = sizeof event};
    if (mode == FREE_ITSELF) {
      while (!atomic_load(&listener.is_done)) wait_a_little();
      EXPECT(eldr_request_free(request), ELDR_STATUS_HANDLE);
      // Only the callback knows when it has returned; the engine's end is a time by which it has.
      while (eldr_engine_drain(engine, 1000) == ELDR_STATUS_WAIT) wait_a_little();
    } else {
      EXPECT(eldr_request_next(request, 0, &event), ELDR_STATUS_ARGUMENT);
      while (mode != STOP ? !atomic_load(&listener.n_ends) : !atomic_load(&listener.is_done)) wait_a_little();
      EXPECT(eldr_request_free(request), ELDR_STATUS_OK);
    }
    EXPECT_TRUE(atomic_load(&listener.n_after) == 0);
    EXPECT_TRUE(mode != COUNT || atomic_load(&listener.n_tokens) == 40);
  }
}

static void freed_while_streaming(const char *model, const int32_t *prompt, size_t n_prompt) {
  eldr_engine *engine = open_engine(model);
  struct listener listener = {.engine = engine, .mode = FREE_ENGINE};
  eldr_request_params params = ask(prompt, n_prompt, 200);
  eldr_request *asked = NULL;
  eldr_request *called = NULL;
  EXPECT(eldr_engine_submit(engine, &params, &asked), ELDR_STATUS_OK);
  params.on_event = on_event;
  params.user = &listener;
  EXPECT(eldr_engine_submit(engine, &params, &called), ELDR_STATUS_OK);
  int n_tokens = 0;
  read_to_end(asked, &n_tokens);
  EXPECT(eldr_request_free(called), ELDR_STATUS_OK);
  EXPECT(eldr_engine_free(engine), ELDR_STATUS_HANDLE);
  const char *json = NULL;
  EXPECT(eldr_engine_stats_json(engine, &json), ELDR_STATUS_HANDLE);
  EXPECT(eldr_request_cancel(asked), ELDR_STATUS_OK);
  EXPECT(eldr_request_free(asked), ELDR_STATUS_OK);
}

void abuse_engine(const char *model) {
  eldr_engine_params params;
  EXPECT(eldr_engine_default_params(&params, sizeof params), ELDR_STATUS_OK);
  eldr_engine *engine = NULL;
  EXPECT(eldr_engine_open(&params, &engine), ELDR_STATUS_NULL);
  params.model = "no such model.gguf";
  params.decode = "1@cpu";
  EXPECT(eldr_engine_open(&params, &engine), ELDR_STATUS_LLAMA);
  params.decode = "many";
  params.n_slots = 0;
  EXPECT(eldr_engine_open(&params, &engine), ELDR_STATUS_CONFIG);
  EXPECT_TRUE(strstr(eldr_last_error(), "'many'") != NULL && strstr(eldr_last_error(), "slots") != NULL);
  params.size = 7;
  EXPECT(eldr_engine_open(&params, &engine), ELDR_STATUS_STRUCT_SIZE);
  EXPECT_TRUE(engine == NULL);

  EXPECT(eldr_log_set(9, on_line, NULL), ELDR_STATUS_ARGUMENT);
  EXPECT(eldr_log_set(5, on_line, NULL), ELDR_STATUS_OK);
  engine = open_engine(model);
  EXPECT(eldr_log_set(0, NULL, NULL), ELDR_STATUS_OK);
  EXPECT_TRUE(atomic_load(&n_lines) > 0 && atomic_load(&refused));

  const char text[] = "def read_lines(path):";
  int32_t prompt[64];
  size_t n_prompt = 0;
  EXPECT(eldr_engine_tokenize(engine, text, strlen(text), prompt, 1, &n_prompt), ELDR_STATUS_BUFFER);
  EXPECT_TRUE(n_prompt > 1 && n_prompt < 64);
  EXPECT(eldr_engine_tokenize(engine, "\xff", 1, prompt, 64, NULL), ELDR_STATUS_UTF8);
  EXPECT(eldr_engine_tokenize(engine, NULL, 3, prompt, 64, NULL), ELDR_STATUS_NULL);
  EXPECT(eldr_engine_tokenize(engine, text, strlen(text), prompt, 64, &n_prompt), ELDR_STATUS_OK);

  asked_requests(engine, prompt, n_prompt);
  uint8_t piece[64];
  size_t n_piece = 0;
  EXPECT(eldr_engine_token_text(engine, -1, piece, sizeof piece, NULL), ELDR_STATUS_ARGUMENT);
  EXPECT(eldr_engine_token_text(engine, prompt[n_prompt - 1], piece, 0, &n_piece), ELDR_STATUS_BUFFER);
  EXPECT(eldr_engine_token_text(engine, prompt[n_prompt - 1], piece, sizeof piece, &n_piece), ELDR_STATUS_OK);
  EXPECT_TRUE(n_piece >= 1 && piece[n_piece - 1] == ':');
  const char *policy = NULL;
  const char *note = NULL;
  EXPECT(eldr_engine_get_policy(engine, NULL, &note), ELDR_STATUS_NULL);
  EXPECT(eldr_engine_get_policy(engine, &policy, &note), ELDR_STATUS_OK);
  EXPECT_TRUE(strcmp(policy, "least_loaded") == 0 && note != NULL && strstr(note, "one decode worker") != NULL);
  EXPECT(eldr_engine_drain_worker(engine, 0), ELDR_STATUS_ARGUMENT);
  EXPECT(eldr_engine_drain_worker(engine, 9), ELDR_STATUS_ARGUMENT);
  EXPECT(eldr_engine_resume_worker(engine, 0), ELDR_STATUS_OK);
  EXPECT(eldr_engine_set_calibration(engine, NULL), ELDR_STATUS_NULL);
  const char *json = NULL;
  EXPECT(eldr_engine_stats_json(engine, &json), ELDR_STATUS_OK);
  EXPECT_TRUE(json != NULL && strstr(json, "\"policy\":\"least_loaded\"") != NULL);
  called_requests(engine, prompt, n_prompt);
  EXPECT(eldr_engine_drain(engine, 60000), ELDR_STATUS_OK);
  eldr_request_params late = ask(prompt, n_prompt, 8);
  eldr_request *request = NULL;
  EXPECT(eldr_engine_submit(engine, &late, &request), ELDR_STATUS_DRAINING);
  EXPECT(eldr_engine_free(engine), ELDR_STATUS_OK);
  EXPECT(eldr_engine_free(engine), ELDR_STATUS_HANDLE);

  freed_while_streaming(model, prompt, n_prompt);
}
