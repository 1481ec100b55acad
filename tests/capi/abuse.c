// Misuses the C library in every way its header promises a status for. Ends with 0 if each gave that status.
//
//   abuse                     the router, without a calibration or a model
//   abuse MODEL               the engine too
#include "abuse.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

static atomic_int n_checks;
static atomic_int n_wrong;

void expect(eldr_status got, eldr_status want, const char *what, int line) {
  atomic_fetch_add(&n_checks, 1);
  if (got == want) return;
  atomic_fetch_add(&n_wrong, 1);
  printf("line %d: %s gave %s, not %s: %s\n", line, what, eldr_status_name(got), eldr_status_name(want),
         eldr_last_error());
}

void expect_true(bool holds, const char *what, int line) {
  atomic_fetch_add(&n_checks, 1);
  if (holds) return;
  atomic_fetch_add(&n_wrong, 1);
  printf("line %d: not so: %s\n", line, what);
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
  EXPECT(eldr_router_step(router, 0, 0, 0.5), ELDR_STATUS_ARGUMENT);
  EXPECT(eldr_router_step(router, 0, 1, 0.5), ELDR_STATUS_OK);
  EXPECT(eldr_router_leave(router, 0), ELDR_STATUS_OK);
  EXPECT(eldr_router_leave(router, 0), ELDR_STATUS_ARGUMENT);
  eldr_cache *cache = NULL;
  EXPECT(eldr_cache_open(model, &cache), ELDR_STATUS_OK);
  EXPECT(eldr_cache_add(cache, -1, 0, NULL, 0), ELDR_STATUS_ARGUMENT);
  EXPECT(eldr_cache_add(cache, 0, -1, NULL, 0), ELDR_STATUS_ARGUMENT);
  EXPECT(eldr_cache_seq_cp(cache, 0, -1, -1, -1), ELDR_STATUS_ARGUMENT);
  EXPECT(eldr_cache_seq_keep(cache, -1), ELDR_STATUS_ARGUMENT);
  EXPECT(eldr_cache_seq_add(cache, -2, 0, 1, 1), ELDR_STATUS_ARGUMENT);
  EXPECT(eldr_cache_seq_rm(cache, -1, -1, -1), ELDR_STATUS_OK);
  EXPECT(eldr_cache_free(cache), ELDR_STATUS_OK);
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

int main(int argc, char **argv) {
  wrong_handles();
  nulls();
  sizes_and_values();
  known_requests();
  older_structs();
  many_threads();
  if (argc > 1) {
    abuse_engine(argv[1]);
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
