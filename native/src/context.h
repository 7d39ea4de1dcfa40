// What all calls of this process share: threads, scratch memory, and the kernels of this CPU.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>

#include "dispatch.h"
#include "thread_pool.h"

namespace quire {

class Context {
 public:
  static Context& get();

  // Replaces the threads; arguments and exceptions as for ThreadPool. A child of fork() begins with one thread, whatever its
  // parent had.
  void set_threads(int num_threads);

  // Uses another instruction set from now on; false if this CPU or this build lacks it.
  bool set_instruction_set(const char* name);

  const Kernels& kernels() const { return *kernels_; }
  ThreadPool& pool() { return *pool_; }

  // At least `bytes` of memory that are the caller's until it lets go of `mutex`. Aligned to 64 bytes, not initialized.
  char* scratch(int64_t bytes);

  std::mutex mutex;  // held during every call: pool and scratch serve one at a time

 private:
  struct Delete {
    void operator()(char* memory) const;
  };

  Context();
  void forget_threads();

  const Kernels* kernels_;
  std::unique_ptr<ThreadPool> pool_;
  std::unique_ptr<char, Delete> memory_;
  int64_t memory_bytes_ = 0;
};

}  // namespace quire
