// A pool for regions of a few microseconds on shared cores.
//
// Work is claimed chunk by chunk from one atomic ticket (generation << 32 | next chunk). The caller claims like
// everybody else and waits only for chunks that somebody has claimed: a helper that has no core at the moment
// costs nothing. Helpers spin briefly after a region, since the next one follows at once within a step, and
// sleep otherwise: an idle engine leaves its cores to router and scheduler.
#include "pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace df {
namespace {

constexpr auto kSpin = std::chrono::microseconds(50);

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

class Pool {
  public:
    void resize(int threads) {
        stop();
        stopping_ = false;
        for (int i = 1; i < threads; i++) helpers_.emplace_back([this] { help(); });
    }

    int size() const { return (int)helpers_.size() + 1; }

    void run(int count, const std::function<void(int)>& job) {
        std::lock_guard<std::mutex> one_region(region_);
        if (helpers_.empty() || count < 2) {
            for (int i = 0; i < count; i++) job(i);
            return;
        }
        job_ = &job;
        count_.store(count);
        done_.store(0);
        const uint64_t generation = (ticket_.load() >> 32) + 1;
        ticket_.store(generation << 32);
        if (sleeping_.load()) {
            std::lock_guard<std::mutex> lock(mutex_);
            wake_.notify_all();
        }
        work(generation);
        while (done_.load() != count) relax();
    }

    void stop() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
            wake_.notify_all();
        }
        for (auto& helper : helpers_) helper.join();
        helpers_.clear();
    }

    ~Pool() { stop(); }

  private:
    // The job and its count stay valid while a claimed chunk of their generation is not done.
    void work(uint64_t generation) {
        uint64_t ticket = ticket_.load();
        while (ticket >> 32 == generation) {
            const int chunk = (int)(uint32_t)ticket;
            if (chunk >= count_.load()) return;
            if (!ticket_.compare_exchange_weak(ticket, ticket + 1)) continue;
            (*job_)(chunk);
            done_.fetch_add(1);
            ticket = ticket_.load();
        }
    }

    void help() {
        uint64_t seen = ticket_.load() >> 32;
        while (!stopping_) {
            const uint64_t generation = await(seen);
            if (generation != seen) work(generation);
            seen = generation;
        }
    }

    uint64_t await(uint64_t seen) {
        const auto until = std::chrono::steady_clock::now() + kSpin;
        do {
            for (int i = 0; i < 64; i++) {
                const uint64_t generation = ticket_.load() >> 32;
                if (generation != seen) return generation;
                relax();
            }
        } while (std::chrono::steady_clock::now() < until);
        std::unique_lock<std::mutex> lock(mutex_);
        sleeping_.fetch_add(1);
        wake_.wait(lock, [&] { return stopping_ || ticket_.load() >> 32 != seen; });
        sleeping_.fetch_sub(1);
        return ticket_.load() >> 32;
    }

    std::vector<std::thread> helpers_;
    std::mutex region_, mutex_;
    std::condition_variable wake_;
    std::atomic<bool> stopping_{false};
    std::atomic<int> sleeping_{0}, count_{0}, done_{0};
    std::atomic<uint64_t> ticket_{0};
    const std::function<void(int)>* job_ = nullptr;
};

Pool& pool() {
    static Pool instance;
    return instance;
}

}  // namespace

void parallel(int count, const std::function<void(int)>& run) { pool().run(count, run); }

int threads() { return pool().size(); }

}  // namespace df

extern "C" void df_set_threads(int threads) { df::pool().resize(threads); }
