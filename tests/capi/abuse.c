// Misuses the C library in every way its header promises a status for. Ends with 0 if each gave that status.
//
//   abuse                     the router, without a calibration or a model
//   abuse MODEL               the engine too
// For nanosleep.
#define _POSIX_C_SOURCE 200809L
#include "eldr.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static atomic_int n_checks;
static atomic_int n_wrong;

static void expect(eldr_status got, eldr_status want, const char *what, int line) {
  atomic_fetch_add(&n_checks, 1);
  if (got == want) return;
  atomic_fetch_add(&n_wrong, 1);
  printf("line %d: %s gave %s, not %s: %s\n", line, what, eldr_status_name(got), eldr_status_name(want),
         eldr_last_error());
}

static void expect_true(bool holds, const char *what, int line) {
  atomic_fetch_add(&n_checks, 1);
  if (holds) return;
  atomic_fetch_add(&n_wrong, 1);
  printf("line %d: not so: %s\n", line, what);
}

#define EXPECT(call, want) expect((call), (want), #call, __LINE__)
#define EXPECT_TRUE(holds) expect_true((holds), #holds, __LINE__)

static void wait_a_little(void) {
  const struct timespec moment = {.tv_nsec = 2000000};
  nanosleep(&moment, NULL);
}

static eldr_router *open_router(uint32_t n_workers, uint32_t n_slots) {
  eldr_router_params params;
  EXPECT(eldr_router_default_params(&params, sizeof params), ELDR_STATUS_OK);
  params.policy = "least_loaded";
  params.n_workers = n_workers;
  params.n_slots = n_slots;
  eldr_router *router = NULL;
  EXPECT(eldr_router_open(&params, &router), ELDR_STATUS_OK);
  return router;
}

static void wrong_handles(void) {
  eldr_router *router = open_router(2, 1);
  eldr_decision decision = {.size = sizeof decision};
  EXPECT(eldr_router_route(router, NULL, NULL, true, &decision), ELDR_STATUS_OK);
  EXPECT_TRUE(decision.worker == 0 && isnan(decision.similarity) && strcmp(decision.reason, "load") == 0);
  EXPECT(eldr_router_route(router, (eldr_signature *) router, NULL, true, &decision), ELDR_STATUS_HANDLE);
  EXPECT(eldr_counts_clear((eldr_counts *) router), ELDR_STATUS_HANDLE);
  EXPECT(eldr_engine_free((eldr_engine *) router), ELDR_STATUS_HANDLE);
  EXPECT(eldr_router_free(router), ELDR_STATUS_OK);
  EXPECT(eldr_router_free(router), ELDR_STATUS_HANDLE);
  EXPECT(eldr_router_report(router, 0, 1), ELDR_STATUS_HANDLE);
  EXPECT(eldr_router_route(router, NULL, NULL, true, &decision), ELDR_STATUS_HANDLE);
  EXPECT_TRUE(strlen(eldr_last_error()) > 0);

  char own[64] = {0};
  void *inside = own + 8;
  EXPECT(eldr_router_report((eldr_router *) own, 0, 1), ELDR_STATUS_HANDLE);
  EXPECT(eldr_router_free((eldr_router *) inside), ELDR_STATUS_HANDLE);
  EXPECT(eldr_cache_clear((eldr_cache *) (uintptr_t) -1), ELDR_STATUS_HANDLE);
}

static void nulls(void) {
  EXPECT(eldr_calibration_open("nowhere", NULL), ELDR_STATUS_NULL);
  eldr_calibration *calibration = NULL;
  EXPECT(eldr_calibration_open(NULL, &calibration), ELDR_STATUS_NULL);
  EXPECT(eldr_calibration_open("no such file", &calibration), ELDR_STATUS_FILE);
  EXPECT(eldr_calibration_open("\xff\xfe", &calibration), ELDR_STATUS_UTF8);
  EXPECT(eldr_calibration_read((const uint8_t *) "{}", 2, &calibration), ELDR_STATUS_CALIBRATION);
  EXPECT(eldr_calibration_read(NULL, 7, &calibration), ELDR_STATUS_NULL);
  EXPECT_TRUE(calibration == NULL);
  EXPECT(eldr_router_open(NULL, NULL), ELDR_STATUS_NULL);
  EXPECT(eldr_router_default_params(NULL, sizeof(eldr_router_params)), ELDR_STATUS_NULL);
  EXPECT(eldr_router_report(NULL, 0, 0), ELDR_STATUS_NULL);
  EXPECT(eldr_engine_submit(NULL, NULL, NULL), ELDR_STATUS_NULL);
  EXPECT(eldr_request_next(NULL, 0, NULL), ELDR_STATUS_NULL);
  EXPECT(eldr_tap_begin(NULL), ELDR_STATUS_NULL);
  EXPECT(eldr_calibration_free(NULL), ELDR_STATUS_OK);
  EXPECT(eldr_counts_free(NULL), ELDR_STATUS_OK);
  EXPECT(eldr_signature_free(NULL), ELDR_STATUS_OK);
  EXPECT(eldr_router_free(NULL), ELDR_STATUS_OK);
  EXPECT(eldr_tap_free(NULL), ELDR_STATUS_OK);
  EXPECT(eldr_cache_free(NULL), ELDR_STATUS_OK);
  EXPECT(eldr_engine_free(NULL), ELDR_STATUS_OK);
  EXPECT(eldr_request_free(NULL), ELDR_STATUS_OK);
  EXPECT_TRUE(!eldr_tap_on_node(NULL, true, NULL) && eldr_tap_on_node(NULL, false, NULL));
  EXPECT_TRUE(strcmp(eldr_status_name(12345), "unknown") == 0);
}

static void sizes_and_values(void) {
  eldr_router_params params;
  EXPECT(eldr_router_default_params(&params, 8), ELDR_STATUS_STRUCT_SIZE);
  EXPECT(eldr_router_default_params(&params, sizeof params + 8), ELDR_STATUS_STRUCT_SIZE);
  memset(&params, 0, sizeof params);
  eldr_router *router = NULL;
  EXPECT(eldr_router_open(&params, &router), ELDR_STATUS_STRUCT_SIZE);
  EXPECT(eldr_router_default_params(&params, sizeof params), ELDR_STATUS_OK);
  params.policy = "fastest";
  EXPECT(eldr_router_open(&params, &router), ELDR_STATUS_CONFIG);
  EXPECT_TRUE(strstr(eldr_last_error(), "locality_band") != NULL);
  params.policy = NULL;
  EXPECT(eldr_router_open(&params, &router), ELDR_STATUS_CONFIG);
  params.policy = "round_robin";
  EXPECT(eldr_router_open(&params, &router), ELDR_STATUS_CONFIG);

  router = open_router(2, 1);
  eldr_decision decision = {.size = 3};
  EXPECT(eldr_router_route(router, NULL, NULL, true, &decision), ELDR_STATUS_STRUCT_SIZE);
  decision.size = sizeof decision;
  EXPECT(eldr_router_route(router, NULL, NULL, true, &decision), ELDR_STATUS_OK);
  EXPECT(eldr_router_route(router, NULL, NULL, true, &decision), ELDR_STATUS_OK);
  EXPECT(eldr_router_route(router, NULL, NULL, true, &decision), ELDR_STATUS_FULL);
  EXPECT(eldr_router_book(router, 0), ELDR_STATUS_FULL);
  EXPECT(eldr_router_book(router, 2), ELDR_STATUS_ARGUMENT);
  EXPECT(eldr_router_unbook(router, 0), ELDR_STATUS_OK);
  EXPECT(eldr_router_unbook(router, 0), ELDR_STATUS_ARGUMENT);
  EXPECT(eldr_router_set_worker(router, 0, 1, false), ELDR_STATUS_OK);
  EXPECT(eldr_router_set_worker(router, 1, 1, false), ELDR_STATUS_OK);
  EXPECT(eldr_router_route(router, NULL, NULL, true, &decision), ELDR_STATUS_NO_WORKER);
  EXPECT(eldr_router_free(router), ELDR_STATUS_OK);

  eldr_tap_params tap;
  eldr_tap *out = NULL;
  EXPECT(eldr_tap_default_params(&tap, sizeof tap), ELDR_STATUS_OK);
  EXPECT(eldr_tap_open(&tap, &out), ELDR_STATUS_NULL);
}

// Requests that are known by their numbers, under the policy that has to know them.
static void known_requests(void) {
  eldr_model_shape shape;
  eldr_calibration *model = NULL;
  EXPECT(eldr_model_shape_init(NULL, sizeof shape), ELDR_STATUS_NULL);
  EXPECT(eldr_model_shape_init(&shape, 4), ELDR_STATUS_STRUCT_SIZE);
  EXPECT(eldr_model_shape_init(&shape, sizeof shape), ELDR_STATUS_OK);
  EXPECT(eldr_calibration_of_shape(&shape, &model), ELDR_STATUS_ARGUMENT);
  shape.n_layer = 3;
  shape.n_expert = 4;
  shape.n_expert_used = 5;
  EXPECT(eldr_calibration_of_shape(&shape, &model), ELDR_STATUS_ARGUMENT);
  shape.n_expert_used = 2;
  const uint32_t wrong[2] = {1, 1};
  shape.layers = wrong;
  shape.n_layers = 2;
  EXPECT(eldr_calibration_of_shape(&shape, &model), ELDR_STATUS_ARGUMENT);
  shape.layers = NULL;
  // Numbers that were never set are not asked of the memory.
  shape.n_layer = UINT32_MAX;
  EXPECT(eldr_calibration_of_shape(&shape, &model), ELDR_STATUS_ARGUMENT);
  shape.n_layer = 4096;
  shape.n_expert = 65536;
  EXPECT(eldr_calibration_of_shape(&shape, &model), ELDR_STATUS_ARGUMENT);
  shape.n_layer = 3;
  shape.n_expert = 4;
  EXPECT(eldr_calibration_of_shape(&shape, NULL), ELDR_STATUS_NULL);
  EXPECT(eldr_calibration_of_shape(NULL, &model), ELDR_STATUS_NULL);
  EXPECT(eldr_calibration_of_shape(&shape, &model), ELDR_STATUS_OK);
  eldr_calibration *wide = NULL;
  EXPECT(eldr_calibration_widen((eldr_calibration *) model, &wide), ELDR_STATUS_OK);
  EXPECT(eldr_calibration_widen(NULL, &wide), ELDR_STATUS_NULL);

  eldr_router_params params;
  EXPECT(eldr_router_default_params(&params, sizeof params), ELDR_STATUS_OK);
  params.policy = "marginal_cost";
  params.n_slots = 2;
  eldr_router *router = NULL;
  EXPECT(eldr_router_open(&params, &router), ELDR_STATUS_CONFIG);
  params.calibration = model;
  EXPECT(eldr_router_open(&params, &router), ELDR_STATUS_CONFIG);
  params.n_workers = UINT32_MAX;
  EXPECT(eldr_router_open(&params, &router), ELDR_STATUS_CONFIG);
  params.n_workers = 2;
  EXPECT(eldr_router_open(&params, &router), ELDR_STATUS_OK);
  const char *policy = NULL;
  EXPECT(eldr_router_get_policy(router, NULL), ELDR_STATUS_NULL);
  EXPECT(eldr_router_get_policy(router, &policy), ELDR_STATUS_OK);
  EXPECT_TRUE(strcmp(policy, "marginal_cost") == 0);

  eldr_counts *counts = NULL;
  EXPECT(eldr_counts_open(model, &counts), ELDR_STATUS_OK);
  const int32_t picks[4] = {0, 1, 1, 2};
  EXPECT(eldr_counts_add(counts, 0, picks, 2), ELDR_STATUS_OK);
  EXPECT(eldr_counts_add(counts, 2, picks, 2), ELDR_STATUS_ARGUMENT);
  eldr_route_request request;
  EXPECT(eldr_route_request_init(&request, sizeof request + 1), ELDR_STATUS_STRUCT_SIZE);
  EXPECT(eldr_route_request_init(&request, sizeof request), ELDR_STATUS_OK);
  request.counts = counts;
  eldr_decision decision = {.size = sizeof decision};
  EXPECT(eldr_router_route_request(router, &request, true, &decision), ELDR_STATUS_TAP);
  EXPECT(eldr_counts_add(counts, 1, picks, 2), ELDR_STATUS_OK);
  EXPECT(eldr_router_route_request(router, NULL, true, &decision), ELDR_STATUS_NULL);
  EXPECT(eldr_router_route_request(router, &request, true, NULL), ELDR_STATUS_NULL);
  EXPECT(eldr_router_route_request(router, &request, true, &decision), ELDR_STATUS_OK);
  EXPECT_TRUE(strcmp(decision.reason, "marginal_cost") == 0 && decision.added_experts > 0 && decision.cost > 0);
  EXPECT(eldr_router_route_request(router, &request, true, &decision), ELDR_STATUS_ARGUMENT);
  request.id = 1;
  request.counts = (eldr_counts *) router;
  EXPECT(eldr_router_place(router, 1, &request), ELDR_STATUS_HANDLE);
  request.counts = counts;
  EXPECT(eldr_counts_free(counts), ELDR_STATUS_OK);
  EXPECT(eldr_router_place(router, 1, &request), ELDR_STATUS_HANDLE);
  request.counts = NULL;
  EXPECT(eldr_router_place(router, 1, &request), ELDR_STATUS_OK);
  EXPECT(eldr_router_place(router, 7, NULL), ELDR_STATUS_NULL);
  EXPECT(eldr_router_book(router, 0), ELDR_STATUS_ARGUMENT);
  EXPECT(eldr_router_step(router, 0, 1, -1.0), ELDR_STATUS_ARGUMENT);
  EXPECT(eldr_router_step(router, 0, 1, 0.5), ELDR_STATUS_OK);
  EXPECT(eldr_router_leave(router, 0), ELDR_STATUS_OK);
  EXPECT(eldr_router_leave(router, 0), ELDR_STATUS_ARGUMENT);
  // Counts that are doubled until no more fit stay what they were.
  EXPECT(eldr_counts_open(model, &counts), ELDR_STATUS_OK);
  for (uint32_t layer = 0; layer < 2; layer++) EXPECT(eldr_counts_add(counts, layer, picks, 2), ELDR_STATUS_OK);
  for (int i = 0; i < 29; i++) EXPECT(eldr_counts_merge(counts, counts), ELDR_STATUS_OK);
  EXPECT(eldr_counts_merge(counts, counts), ELDR_STATUS_ARGUMENT);
  uint32_t n_tokens = 0;
  EXPECT(eldr_counts_get_tokens(counts, &n_tokens), ELDR_STATUS_OK);
  EXPECT_TRUE(n_tokens == 1u << 30);
  EXPECT(eldr_counts_free(counts), ELDR_STATUS_OK);
  EXPECT(eldr_calibration_free(model), ELDR_STATUS_OK);
  EXPECT(eldr_calibration_free(model), ELDR_STATUS_HANDLE);
  EXPECT(eldr_calibration_free(wide), ELDR_STATUS_OK);
  EXPECT(eldr_router_free(router), ELDR_STATUS_OK);
  EXPECT(eldr_router_leave(router, 1), ELDR_STATUS_HANDLE);
}

// A struct of an older, shorter version is filled no further than it goes.
static void older_structs(void) {
  eldr_router *router = open_router(1, 4);
  const size_t n_known = offsetof(eldr_decision, experts);
  eldr_decision old;
  memset(&old, 0x5a, sizeof old);
  old.size = n_known;
  EXPECT(eldr_router_route(router, NULL, NULL, false, &old), ELDR_STATUS_OK);
  const unsigned char *bytes = (const unsigned char *) &old;
  bool is_kept = true;
  for (size_t i = n_known; i < sizeof old; i++) is_kept = is_kept && bytes[i] == 0x5a;
  EXPECT_TRUE(is_kept && strcmp(old.reason, "load") == 0);
  EXPECT(eldr_router_free(router), ELDR_STATUS_OK);
}

// Many threads route, report and free at once: one free succeeds, nothing is booked twice.
static atomic_int n_freed;
static atomic_int n_booked;

static void *route_and_free(void *arg) {
  eldr_router *router = arg;
  for (int i = 0; i < 200; i++) {
    eldr_decision decision = {.size = sizeof decision};
    if (eldr_router_route(router, NULL, NULL, true, &decision) == ELDR_STATUS_OK) atomic_fetch_add(&n_booked, 1);
  }
  if (eldr_router_free(router) == ELDR_STATUS_OK) atomic_fetch_add(&n_freed, 1);
  return NULL;
}

static void many_threads(void) {
  pthread_t threads[8];
  eldr_router *router = open_router(4, 10);
  for (int i = 0; i < 8; i++) pthread_create(&threads[i], NULL, route_and_free, router);
  for (int i = 0; i < 8; i++) pthread_join(threads[i], NULL);
  EXPECT_TRUE(atomic_load(&n_freed) == 1);
  EXPECT_TRUE(atomic_load(&n_booked) <= 40);
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

static void engine(const char *model) {
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

int main(int argc, char **argv) {
  wrong_handles();
  nulls();
  sizes_and_values();
  known_requests();
  older_structs();
  many_threads();
  if (argc > 1) {
    engine(argv[1]);
  } else if (!eldr_has_engine()) {
    eldr_engine_params params;
    EXPECT(eldr_engine_default_params(&params, sizeof params), ELDR_STATUS_OK);
    params.model = "a.gguf";
    eldr_engine *out = NULL;
    EXPECT(eldr_engine_open(&params, &out), ELDR_STATUS_UNSUPPORTED);
  }
  printf("%d checks, %d wrong\n", atomic_load(&n_checks), atomic_load(&n_wrong));
  return atomic_load(&n_wrong) == 0 ? 0 : 1;
}
