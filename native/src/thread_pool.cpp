#include "thread_pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <stdexcept>
#include <string>
#include <utility>

namespace quire {
namespace {

// A worker that finds no job spins this often before it sleeps: some tens of microseconds, longer than the pause between
// two kernels of a step and shorter than what a neighbour would miss.
constexpr int kSpinsBeforeSleep = 2000;
constexpr int kSpinsBeforeYield = 2000;

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");  // waits for tens of cycles; `yield` would be over at once
#else
  std::this_thread::yield();
#endif
}

int checked(int num_threads) {
  if (num_threads < 1) throw std::invalid_argument(std::to_string(num_threads) + " threads; there must be at least 1");
  return num_threads;
}

uint64_t range_state(int64_t begin, int64_t end) { return static_cast<uint64_t>(end) << 32 | static_cast<uint64_t>(begin); }

}  // namespace

ThreadPool::ThreadPool(int num_threads) : num_threads_(checked(num_threads)), ranges_(new Range[num_threads]) {
  try {
    for (int thread = 1; thread < num_threads; ++thread) threads_.emplace_back([this, thread] { serve(thread); });
  } catch (...) {
    stop();  // those that there are, or the end of the process would be theirs
    throw;
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_.store(true);
  }
  job_or_stop_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::run(int64_t num_tasks, Body body, void* context) {
  if (num_threads_ == 1 || num_tasks <= 1) {
    for (int64_t task = 0; task < num_tasks; ++task) body(context, task, 0);
    return;
  }
  body_.store(body, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  num_left_.store(num_tasks, std::memory_order_relaxed);
  for (int thread = 0; thread < num_threads_; ++thread) {
    const int64_t begin = num_tasks * thread / num_threads_;
    const int64_t end = num_tasks * (thread + 1) / num_threads_;
    ranges_[thread].state.store(range_state(begin, end), std::memory_order_release);
  }
  epoch_.fetch_add(1);
  if (num_asleep_.load() > 0) {
    const std::lock_guard<std::mutex> lock(mutex_);
    job_or_stop_.notify_all();
  }
  work(0);
  for (int spins = 0; num_left_.load(std::memory_order_acquire) > 0; ++spins) {
    if (spins < kSpinsBeforeYield) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
}

void ThreadPool::serve(int thread) {
  uint64_t seen = 0;
  while (wait_for_job(seen)) work(thread);
}

// Returns false when the pool is to stop.
bool ThreadPool::wait_for_job(uint64_t& seen) {
  for (int spins = 0; spins < kSpinsBeforeSleep; ++spins) {
    const uint64_t epoch = epoch_.load();
    if (epoch != std::exchange(seen, epoch)) return true;
    if (stopping_.load(std::memory_order_relaxed)) return false;
    pause();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  // Announced before the last look at the epoch: a job that comes after that look sees a sleeper and wakes it.
  num_asleep_.fetch_add(1);
  job_or_stop_.wait(lock, [&] { return epoch_.load() != seen || stopping_.load(); });
  num_asleep_.fetch_sub(1);
  seen = epoch_.load();
  return !stopping_.load();
}

// A claim that succeeds is of the current job, however late this thread comes: the ranges of a job that is over are empty,
// and a job is not over while a claimed task is not done.
void ThreadPool::work(int thread) {
  int64_t num_done = 0;
  for (int offset = 0; offset < num_threads_; ++offset) {
    std::atomic<uint64_t>& state = ranges_[(thread + offset) % num_threads_].state;
    uint64_t claimed = state.load(std::memory_order_acquire);
    while (static_cast<uint32_t>(claimed) < claimed >> 32) {
      if (!state.compare_exchange_weak(claimed, claimed + 1, std::memory_order_acq_rel)) continue;
      const Body body = body_.load(std::memory_order_relaxed);
      body(context_.load(std::memory_order_relaxed), static_cast<uint32_t>(claimed), thread);
      ++num_done;
      claimed = state.load(std::memory_order_acquire);
    }
  }
  if (num_done > 0) num_left_.fetch_sub(num_done, std::memory_order_release);
}

}  // namespace quire
