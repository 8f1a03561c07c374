// What those share that try a program from its inside. Included after the program.

inline int Fail(const std::string& text) {
  printf("wrong: %s\n", text.c_str());
  return 1;
}

// Calls `poll` until `done` returns true.
inline void Until(const std::function<void()>& poll,
                  const std::function<bool()>& done) {
  for (Clock::time_point start = Clock::now(); !done(); poll()) {
    CheckSilence(start, "polling");
  }
}
