// Ends while an engine is open, its workers busy and its requests unread: the process must end as it was told to.
//
//   exit MODEL exit           by exit(), with one of its callbacks running
//   exit MODEL return         by the end of main()
// For nanosleep.
#define _POSIX_C_SOURCE 200809L
#include "eldr.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static atomic_int n_events;

static bool on_event(eldr_request *request, const eldr_event *event, void *user) {
  (void) request, (void) event, (void) user;
  atomic_fetch_add(&n_events, 1);
  return true;
}

static void must(eldr_status status) {
  if (status == ELDR_STATUS_OK) return;
  fprintf(stderr, "%s: %s\n", eldr_status_name(status), eldr_last_error());
  _Exit(1);
}

int main(int argc, char **argv) {
  if (argc != 3) return 2;
  eldr_engine_params params;
  must(eldr_engine_default_params(&params, sizeof params));
  params.model = argv[1];
  params.prefill = "1@cpu";
  params.decode = "1@cpu";
  params.n_threads = 1;
  params.n_slots = 4;
  params.n_ctx_slot = 512;
  eldr_engine *engine = NULL;
  must(eldr_engine_open(&params, &engine));

  const int32_t prompt[4] = {40, 41, 42, 43};
  eldr_request_params ask;
  must(eldr_request_default_params(&ask, sizeof ask));
  ask.prompt = prompt;
  ask.n_prompt = 4;
  ask.max_tokens = 500;
  ask.ignore_eos = 1;
  eldr_request *request = NULL;
  must(eldr_engine_submit(engine, &ask, &request));
  ask.on_event = on_event;
  must(eldr_engine_submit(engine, &ask, &request));
  const struct timespec moment = {.tv_nsec = 1000000};
  while (atomic_load(&n_events) < 5) nanosleep(&moment, NULL);
  if (strcmp(argv[2], "exit") == 0) exit(0);
  return 0;
}
