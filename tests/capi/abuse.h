// What the two halves of the misuse share: how a status is checked.
#ifndef ELDR_TESTS_ABUSE_H
#define ELDR_TESTS_ABUSE_H

#include "eldr.h"

// Misuses an engine that serves the model there.
void abuse_engine(const char *model);

void expect(eldr_status got, eldr_status want, const char *what, int line);
void expect_true(bool holds, const char *what, int line);

#define EXPECT(call, want) expect((call), (want), #call, __LINE__)
#define EXPECT_TRUE(holds) expect_true((holds), #holds, __LINE__)

#endif
