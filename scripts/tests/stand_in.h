// What the libraries that are loaded in front of libfabric share.

#pragma once

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

inline long Setting(const char* name, long otherwise) {
  const char* value = getenv(name);
  return value ? atol(value) : otherwise;
}

[[noreturn]] inline void Die(const char* what) {
  fprintf(stderr, "%s: %s\n", STAND_IN, what);
  abort();
}

// Returns the function whose place one of ours has taken.
template <typename Function>
Function* Next(const char* name, Function*) {
  void* function = dlsym(RTLD_NEXT, name);
  if (function == nullptr) Die("the program does not use libfabric");
  return reinterpret_cast<Function*>(function);
}
