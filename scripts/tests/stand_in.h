// What the libraries that are loaded in front of libfabric share. Its functions are
// mostly inline, and call through tables of pointers, so each object gets its own copy of
// its tables, with some of the functions replaced.

#pragma once

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

inline long Setting(const char* name, long otherwise) {
  const char* value = getenv(name);
  return value ? atol(value) : otherwise;
}

[[noreturn]] inline void Die(const char* what) {
  fprintf(stderr, "%s: %s\n", STAND_IN, what);
  abort();
}

// Gives an object a copy of one of its tables. Returns the table that it had. The library
// may be newer than our headers and its tables longer, so a table itself says how long it
// is. Copies are never freed: an object may use its table until the end of its fi_close.
template <typename Table>
Table* Replace(Table*& table) {
  Table* real = table;
  table = static_cast<Table*>(malloc(real->size));
  if (table == nullptr) Die("no memory");
  memcpy(table, real, real->size);
  return real;
}

// Returns the function whose place one of ours has taken.
template <typename Function>
Function* Next(const char* name, Function*) {
  void* function = dlsym(RTLD_NEXT, name);
  if (function == nullptr) Die("the program does not use libfabric");
  return reinterpret_cast<Function*>(function);
}
