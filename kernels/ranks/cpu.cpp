// What the ranks of one host tell each other in the middle of a step: sums and rows, through shared memory.
//
// An exchange: each rank writes its part to a slot of its own, says so, waits until all have, and reads what it
// needs of theirs. Parts are added in the order of ranks, so that all get equal bits, whoever came first. Slots
// are used in turn, two of each rank: who writes one again has seen all others arrive at the exchange between,
// after they had read it. Waiting spins for a while and then sleeps; a rank that does not come, or is known to
// be gone, ends this exchange and all that follow, and whoever drives the step looks at `lost`.
#include "../cpu/entry.h"
#include "../cpu/pool.h"
#include "../cpu/simd.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <ctime>

namespace df {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMostRanks = 64;
constexpr int64_t kNapNs = 20'000'000;
// of one exchange that the threads share
constexpr int64_t kChunk = 16384;

struct alignas(64) Counter {
    std::atomic<uint64_t> value;
};

// At the beginning of the shared memory, which is zeros at first; `shared.py` knows where `aborted` lies.
struct Control {
    alignas(64) std::atomic<uint32_t> aborted;
    alignas(64) std::atomic<uint32_t> bell;
    alignas(64) std::atomic<uint32_t> sleepers;
    Counter arrived[kMostRanks];
};
static_assert(sizeof(Control) <= 8192);
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

// A rank's own: the fields of `shared.py`, in its order.
struct Member {
    Control* control;
    char* slots;
    int64_t rank, ranks, slot_bytes, spin_ns, patience_ns, turn, lost;

    char* slot(int64_t of) const { return slots + (of * 2 + (turn & 1)) * slot_bytes; }
};

void sleep_until_rung(std::atomic<uint32_t>& bell, uint32_t heard) {
    timespec nap{0, kNapNs};
    syscall(SYS_futex, &bell, FUTEX_WAIT, heard, &nap, nullptr, 0);
}

bool all_arrived(const Member& m) {
    for (int64_t r = 0; r < m.ranks; r++)
        if (m.control->arrived[r].value.load() < (uint64_t)m.turn) return false;
    return true;
}

bool spin(const Member& m) {
    const auto until = Clock::now() + std::chrono::nanoseconds(m.spin_ns);
    do {
        for (int i = 0; i < 64; i++) {
            if (all_arrived(m)) return true;
            relax();
        }
    } while (Clock::now() < until);
    return false;
}

// Time in which this process itself was frozen is not time waited: of each nap no more than a few count.
bool sleep(const Member& m) {
    int64_t waited = 0;
    auto before = Clock::now();
    while (waited < m.patience_ns) {
        const uint32_t heard = m.control->bell.load();
        m.control->sleepers.fetch_add(1);
        const bool done = all_arrived(m);
        if (!done) sleep_until_rung(m.control->bell, heard);
        m.control->sleepers.fetch_sub(1);
        if (done || all_arrived(m)) return true;
        if (m.control->aborted.load()) return false;
        const auto now = Clock::now();
        waited += std::min<int64_t>(std::chrono::nanoseconds(now - before).count(), 4 * kNapNs);
        before = now;
    }
    return false;
}

// `write` fills our slot, `read` takes what it wants from all slots of this turn.
template <class Write, class Read> void exchange(Member& m, Write write, Read read) {
    if (m.lost) return;
    m.turn++;
    write(m.slot(m.rank));
    m.control->arrived[m.rank].value.store((uint64_t)m.turn);
    if (m.control->sleepers.load() && all_arrived(m)) {
        m.control->bell.fetch_add(1);
        syscall(SYS_futex, &m.control->bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }
    if (spin(m) || sleep(m))
        read();
    else
        m.lost = 1;
}

f32x16 load_values(const bf16* x) { return load_bf16(x); }
f32x16 load_values(const float* x) { return load<f32x16>(x); }
void store_values(bf16* x, f32x16 v) { store_bf16(x, v); }
void store_values(float* x, f32x16 v) { store(x, v); }
float value(bf16 x) { return to_float(x); }
float value(float x) { return x; }
void set(bf16& x, float v) { x = to_bf16(v); }
void set(float& x, float v) { x = v; }

// total[i] = (kept ? total[i] : 0) + part of rank 0 + part of rank 1 …, in fp32
template <bool kept, class Part, class Total> void add_parts(const Member& m, Total* total, int64_t count) {
    parallel((int)((count + kChunk - 1) / kChunk), [&](int chunk) {
        const int64_t end = std::min<int64_t>(count, (chunk + 1) * kChunk);
        int64_t i = chunk * kChunk;
        for (; i + 16 <= end; i += 16) {
            f32x16 sum = kept ? load_values(total + i) : load_values((const Part*)m.slot(0) + i);
            for (int64_t r = kept ? 0 : 1; r < m.ranks; r++) sum += load_values((const Part*)m.slot(r) + i);
            store_values(total + i, sum);
        }
        for (; i < end; i++) {
            float sum = kept ? value(total[i]) : value(((const Part*)m.slot(0))[i]);
            for (int64_t r = kept ? 0 : 1; r < m.ranks; r++) sum += value(((const Part*)m.slot(r))[i]);
            set(total[i], sum);
        }
    });
}

template <bool kept, class Part, class Total>
void sum(Member& m, const Part* part, Total* total, int64_t count) {
    const int64_t most = m.slot_bytes / (int64_t)sizeof(Part);
    for (int64_t first = 0; first < count; first += most) {
        const int64_t here = std::min(most, count - first);
        exchange(m, [&](char* slot) { std::memcpy(slot, part + first, here * sizeof(Part)); },
                 [&] { add_parts<kept, Part>(m, total + first, here); });
    }
}

}  // namespace
}  // namespace df

// x = the sum of all ranks' x, in fp32, rounded once. wide: x is fp32, else bf16.
extern "C" void df_sum_ranks(void* member, void* x, int64_t count, int wide) {
    using namespace df;
    Member& m = *(Member*)member;
    wide ? sum<false>(m, (const float*)x, (float*)x, count) : sum<false>(m, (const bf16*)x, (bf16*)x, count);
}
DF_RECORDABLE(df_sum_ranks)

// residual (fp32) += x of rank 0, then of rank 1, and so on. wide: x is fp32, else bf16.
extern "C" void df_add_sum_ranks(void* member, const void* x, float* residual, int64_t count, int wide) {
    using namespace df;
    Member& m = *(Member*)member;
    wide ? sum<true>(m, (const float*)x, residual, count) : sum<true>(m, (const bf16*)x, residual, count);
}
DF_RECORDABLE(df_add_sum_ranks)

// out [R][columns] on rank 0: all ranks' x [R][own] side by side, where rank r's begin at r·widest.
extern "C" void df_join_ranks(void* member, const float* x, float* out, int64_t R, int64_t widest,
                              int64_t columns) {
    using namespace df;
    Member& m = *(Member*)member;
    const auto width = [&](int64_t r) { return std::clamp<int64_t>(columns - r * widest, 0, widest); };
    const int64_t own = width(m.rank), most = m.slot_bytes / (int64_t)sizeof(float);
    const int64_t across = std::min(widest, most), rows = std::max<int64_t>(1, most / widest);
    for (int64_t row = 0; row < R; row += rows)
        for (int64_t first = 0; first < widest; first += across) {
            const int64_t here = std::min(rows, R - row);
            const auto span = [&](int64_t r) { return std::clamp<int64_t>(width(r) - first, 0, across); };
            const auto write = [&](char* slot) {
                for (int64_t i = 0; i < here; i++)
                    std::memcpy((float*)slot + i * across, x + (row + i) * own + first, span(m.rank) * 4);
            };
            const auto read = [&] {
                for (int64_t r = 0; r < m.ranks && m.rank == 0; r++)
                    for (int64_t i = 0; i < here; i++)
                        std::memcpy(out + (row + i) * columns + r * widest + first,
                                    (const float*)m.slot(r) + i * across, span(r) * 4);
            };
            exchange(m, write, read);
        }
}
DF_RECORDABLE(df_join_ranks)

// x, of `bytes` bytes, becomes rank 0's.
extern "C" void df_from_rank_0(void* member, char* x, int64_t bytes) {
    using namespace df;
    Member& m = *(Member*)member;
    for (int64_t first = 0; first < bytes; first += m.slot_bytes) {
        const int64_t here = std::min(m.slot_bytes, bytes - first);
        const auto write = [&](char* slot) {
            if (m.rank == 0) std::memcpy(slot, x + first, here);
        };
        const auto read = [&] {
            if (m.rank != 0) std::memcpy(x + first, m.slot(0), here);
        };
        exchange(m, write, read);
    }
}
DF_RECORDABLE(df_from_rank_0)
