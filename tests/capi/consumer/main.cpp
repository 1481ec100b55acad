// Routes requests with the installed package, by load and by their picks: consumer_eldr or consumer_static.
#include <eldr.hpp>

#include <cstdio>

extern "C" const char *version_in_c(void);

// By load: how many requests each worker holds is all that is known.
static bool by_load() {
  eldr_router_params params = eldr::router_params();
  params.policy = "least_loaded";
  params.n_workers = 3;
  params.n_slots = 2;
  eldr::router router(params);
  router.report(0, 1);
  eldr_decision decision;
  if (router.route(eldr::signature(), decision) != ELDR_STATUS_OK) return false;
  try {
    router.unbook(2);
    return false;
  } catch (const eldr::error &wrong) {
    if (wrong.status() != ELDR_STATUS_ARGUMENT) return false;
  }
  std::printf("eldr %s: worker %u, by %s\n", version_in_c(), decision.worker, decision.reason);
  return decision.worker == 1;
}

// By what it would cost the running batches: the router knows each request by its number, and no calibration is needed.
static bool by_cost() {
  eldr_model_shape shape = eldr::model_shape();
  shape.n_layer = 2; // the last one does not show in prompts
  shape.n_expert = 8;
  shape.n_expert_used = 2;
  const eldr::calibration model(shape);
  eldr_router_params params = eldr::router_params();
  params.policy = "auto";
  params.calibration = model.get();
  params.n_workers = 2;
  eldr::router router(params);

  const std::int32_t picks[2][4] = {{0, 1, 0, 1}, {6, 7, 6, 7}};
  std::uint32_t homes[2] = {0, 0};
  for (std::uint64_t id = 0; id < 8; id++) {
    eldr::counts counts(model);
    counts.add(0, picks[id % 2], 2);
    eldr_route_request request = eldr::route_request();
    request.id = id;
    request.counts = counts.get();
    eldr_decision decision;
    if (router.route(request, decision) != ELDR_STATUS_OK) return false;
    if (id < 2) homes[id] = decision.worker;
    if (decision.worker != homes[id % 2]) return false;
    router.step(decision.worker, static_cast<std::uint32_t>(id / 2 + 1), 1.0);
  }
  for (std::uint64_t id = 0; id < 8; id++) router.leave(id);
  std::printf("%s: like joins like, workers %u and %u\n", router.policy().data(), homes[0], homes[1]);
  return homes[0] != homes[1];
}

int main() { return by_load() && by_cost() ? 0 : 1; }
