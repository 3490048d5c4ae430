// Random numbers that are the same for a seed on every machine: SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom
// Number Generators", OOPSLA 2014).
#pragma once

#include <cstdint>

namespace sidestream {

class SeededNumbers {
 public:
  explicit SeededNumbers(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }

  // One of 0 to count - 1, each as likely as the others.
  uint64_t below(uint64_t count) {
    // The last, incomplete, round of the remainders would favour small numbers.
    const uint64_t unbiased = UINT64_MAX - UINT64_MAX % count;
    uint64_t number = next();
    while (number >= unbiased) {
      number = next();
    }
    return number % count;
  }

 private:
  uint64_t state_;
};

} // namespace sidestream
