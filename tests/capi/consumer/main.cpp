// Routes one request by load with the installed package: consumer_eldr or consumer_static.
#include <eldr.hpp>

#include <cstdio>

extern "C" const char *version_in_c(void);

int main() {
  eldr_router_params params = eldr::router_params();
  params.policy = "least_loaded";
  params.n_workers = 3;
  params.n_slots = 2;
  eldr::router router(params);
  router.report(0, 1);
  eldr_decision decision;
  if (router.route(eldr::signature(), decision) != ELDR_STATUS_OK) return 1;
  try {
    router.unbook(2);
    return 1;
  } catch (const eldr::error &wrong) {
    if (wrong.status() != ELDR_STATUS_ARGUMENT) return 1;
  }
  std::printf("eldr %s: worker %u, by %s\n", version_in_c(), decision.worker, decision.reason);
  return decision.worker == 1 ? 0 : 1;
}
