// A pool for regions of a few microseconds on shared cores.
//
// Work is claimed chunk by chunk from one atomic ticket: the region's number, how many chunks it has, and the
// next of them. All three have to be in one word: a helper that saw the next chunk of one region and the count
// of another would claim what is not there. The caller claims like everybody else and waits only for chunks
// that somebody has claimed: a helper that has no core at the moment costs nothing. Helpers spin briefly after
// a region, since the next one follows at once within a step, and sleep otherwise: an idle engine leaves its
// cores to router and scheduler.
#include "pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace df {
namespace {

constexpr auto kSpin = std::chrono::microseconds(50);
constexpr int kMostChunks = 0xffff;

// region: 32 bits, count: 16, next: 16
inline uint64_t region_of(uint64_t ticket) { return ticket >> 32; }
inline int count_of(uint64_t ticket) { return (int)(ticket >> 16 & 0xffff); }
inline int next_of(uint64_t ticket) { return (int)(ticket & 0xffff); }

class Pool {
  public:
    void resize(int threads) {
        stop();
        stopping_ = false;
        for (int i = 1; i < threads; i++) helpers_.emplace_back([this] { help(); });
    }

    int size() const { return (int)helpers_.size() + 1; }

    void run(int count, const std::function<void(int)>& job) {
        std::lock_guard<std::mutex> one_at_a_time(turn_);
        for (int first = 0; first < count; first += kMostChunks) {
            const int chunks = std::min(count - first, kMostChunks);
            if (helpers_.empty() || chunks < 2)
                for (int i = 0; i < chunks; i++) job(first + i);
            else if (first == 0)
                share(chunks, job);
            else
                share(chunks, [&](int i) { job(first + i); });
        }
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
    void share(int chunks, const std::function<void(int)>& job) {
        // nobody reads these before the ticket names the new region
        job_ = &job;
        done_.store(0);
        const uint64_t region = (region_of(ticket_.load()) + 1) & 0xffffffff;
        ticket_.store(region << 32 | (uint64_t)chunks << 16);
        if (sleeping_.load()) {
            std::lock_guard<std::mutex> lock(mutex_);
            wake_.notify_all();
        }
        work(region);
        while (done_.load() != chunks) relax();
    }

    // The job stays valid while a chunk of its region is claimed and not done.
    void work(uint64_t region) {
        uint64_t ticket = ticket_.load();
        while (region_of(ticket) == region && next_of(ticket) < count_of(ticket)) {
            if (!ticket_.compare_exchange_weak(ticket, ticket + 1)) continue;
            (*job_)(next_of(ticket));
            done_.fetch_add(1);
            ticket = ticket_.load();
        }
    }

    void help() {
        uint64_t seen = region_of(ticket_.load());
        while (!stopping_) {
            const uint64_t region = await(seen);
            if (region != seen) work(region);
            seen = region;
        }
    }

    uint64_t await(uint64_t seen) {
        const auto until = std::chrono::steady_clock::now() + kSpin;
        do {
            for (int i = 0; i < 64; i++) {
                const uint64_t region = region_of(ticket_.load());
                if (region != seen) return region;
                relax();
            }
        } while (std::chrono::steady_clock::now() < until);
        std::unique_lock<std::mutex> lock(mutex_);
        sleeping_.fetch_add(1);
        wake_.wait(lock, [&] { return stopping_ || region_of(ticket_.load()) != seen; });
        sleeping_.fetch_sub(1);
        return region_of(ticket_.load());
    }

    std::vector<std::thread> helpers_;
    std::mutex turn_, mutex_;
    std::condition_variable wake_;
    std::atomic<bool> stopping_{false};
    std::atomic<int> sleeping_{0}, done_{0};
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
