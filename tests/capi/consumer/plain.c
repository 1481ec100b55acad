// The header in a C translation unit, beside one of C++.
#include <eldr.h>

const char *version_in_c(void);

const char *version_in_c(void) {
  return eldr_abi_version() >= ELDR_ABI_VERSION ? eldr_version() : "too old";
}
