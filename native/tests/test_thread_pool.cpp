// Every task runs once, on a thread that exists, and is over when run() returns; for jobs of all sizes in quick succession.
#include "thread_pool.h"

#include <atomic>
#include <chrono>
#include <thread>

#include "check.h"

using namespace quire;
using namespace quire::test;

void every_task_runs_once(ThreadPool& pool, int64_t num_tasks) {
  std::vector<int> runs(num_tasks, 0);  // not atomic: two threads at one task would be a race
  parallel_for(pool, num_tasks, [&](int64_t task, int thread) {
    CHECK(0 <= thread && thread < pool.num_threads(), "thread %d of %d", thread, pool.num_threads());
    ++runs[task];
  });
  for (int64_t task = 0; task < num_tasks; ++task) {
    CHECK(runs[task] == 1, "task %ld of %ld ran %d times", static_cast<long>(task), static_cast<long>(num_tasks), runs[task]);
  }
}

void results_of_one_job_are_seen_by_the_next(ThreadPool& pool) {
  std::vector<int64_t> values(257, 1);
  for (int round = 0; round < 20; ++round) {
    std::vector<int64_t> next(values.size());
    parallel_for(pool, static_cast<int64_t>(values.size()),
                 [&](int64_t task, int) { next[task] = values[task] + values[(task + 1) % values.size()]; });
    values = next;
  }
  for (const int64_t value : values) CHECK(value == 1 << 20, "%ld", static_cast<long>(value));
}

void sleepers_wake_up(ThreadPool& pool) {
  for (int round = 0; round < 5; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // longer than workers spin: now they sleep
    every_task_runs_once(pool, 64);
  }
}

void slow_tasks_are_taken_over(ThreadPool& pool) {
  // The first range holds all the work; without taking over, one thread would do it alone.
  std::vector<std::atomic<int>> by_thread(pool.num_threads());
  parallel_for(pool, 64, [&](int64_t task, int thread) {
    if (task < 32) {
      for (int turn = 0; turn < 20000; ++turn) std::atomic_signal_fence(std::memory_order_seq_cst);
    }
    ++by_thread[thread];
  });
  int total = 0;
  for (const auto& count : by_thread) total += count;
  CHECK(total == 64, "%d tasks", total);
}

int main() {
  for (const int num_threads : {1, 2, 3, 8}) {
    ThreadPool pool(num_threads);
    for (int job = 0; job < 2000; ++job) every_task_runs_once(pool, random_int(0, 40));
    every_task_runs_once(pool, 100000);
    results_of_one_job_are_seen_by_the_next(pool);
    sleepers_wake_up(pool);
    slow_tasks_are_taken_over(pool);
  }
  for (int pool = 0; pool < 50; ++pool) ThreadPool(4);  // ends at once, whether or not its threads have begun
}
