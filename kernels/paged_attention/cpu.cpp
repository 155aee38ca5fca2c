// Causal attention over the paged cache, for any mix of prefill chunks and decodes; q in bf16, sums in fp32.
//
// One work item is a tile of query rows (tokens times the query heads that share a KV head) of one sequence.
// It walks keys by online softmax, in tiles that begin at their multiples, and starts anew at every multiple of
// kSplit keys; the states of the splits are merged in order of position. So a row's arithmetic depends neither
// on the other rows nor on whether splits were computed by one thread or by several, and a token's output is
// the same in a prefill chunk, in a decode, alone or in a batch. Sinks with queries of their own come first, as
// a split of their own. Keys that no row of a tile sees are not read.
#include "../cpu/entry.h"
#include "../cpu/pool.h"
#include "../cpu/product.h"
#include "../cpu/simd.h"
#include "cpu_keys.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

namespace df {
namespace {

constexpr int64_t kSplit = 256;
// more rows share a tile of widened keys, fewer leave more to share out
constexpr int64_t kRows = 96;
// with fewer, work is shared out by span too, unless the states of all spans take too much memory
constexpr int kJobsPerThread = 8;
constexpr int64_t kMostPartFloats = 8 << 20;
constexpr int64_t kEverything = INT64_MAX / 2;

typedef void (*SpreadKeys)(const char*, const char*, int64_t, float*, int64_t);
typedef void (*SpreadValues)(const char*, const char*, int64_t, float*);

struct Attention {
    const bf16 *q, *q_sink;
    const char* values;      // a layer's [2][kv_heads][16][D], every block_stride bytes
    const float* scales;     // a layer's [kv_heads][2][16], every scale_stride floats; null where not quantised
    bf16* out;
    const int32_t* table;
    const int64_t* positions;
    const float* learned;  // [heads] or null
    int64_t table_width, block_stride, plane_bytes, head_bytes, scale_stride, heads, kv_heads, D, q_stride,
        q_sink_stride, window;
    int64_t sinks;  // keys that are scored apart; 0 where they are keys like others
    float scale, soft_cap;  // soft_cap 0: none
    SpreadKeys spread_keys;
    SpreadValues spread_values;

    int64_t group() const { return heads / kv_heads; }
    int64_t tile_keys() const { return D <= 128 ? 64 : 32; }
};

struct Tile {
    int32_t seq, first, count;
};

// Keys [begin, end) for a tile. Sinks: scored by q_sink.
struct Span {
    int64_t begin, end;
    bool sinks;
};

// Of some rows: log of the largest weight so far, sum of weights (by lane), weighted values [rows][D].
struct State {
    float* peak;
    float* total;
    float* acc;

    static int64_t floats(int64_t rows, int64_t D) { return rows * (D + 16) + (rows + 15) / 16 * 16; }

    State(float* memory, int64_t rows)
        : peak(memory), total(memory + (rows + 15) / 16 * 16), acc(total + rows * 16) {}

    void clear(int64_t rows, int64_t D) {
        std::fill(peak, peak + rows, -INFINITY);
        std::fill(total, total + rows * 16, 0.0f);
        std::fill(acc, acc + rows * D, 0.0f);
    }
};

// What a thread works in; floats on whole cache lines.
struct Workspace {
    std::vector<f32x16> memory;
    std::vector<int64_t> first, last;
    float *q, *q_sink, *k, *v, *k_scales, *v_scales, *weights, *part, *sum;

    void fit(int64_t rows, int64_t D, int64_t keys) {
        const int64_t state = State::floats(rows, D);
        const int64_t sizes[] = {rows * D, rows * D, keys * D, keys * D, keys, keys, kMostRows * keys, state, state};
        float** places[] = {&q, &q_sink, &k, &v, &k_scales, &v_scales, &weights, &part, &sum};
        int64_t total = 0;
        for (int64_t size : sizes) total += size;
        if ((int64_t)memory.size() < total / 16) memory.resize(total / 16);
        if ((int64_t)first.size() < rows) first.resize(rows), last.resize(rows);
        float* next = (float*)memory.data();
        for (int i = 0; i < 9; i++) {
            *places[i] = next;
            next += sizes[i];
        }
    }
};

// tanh, which is 1 long before the exponential would overflow
f32x16 capped(f32x16 scores, float cap) {
    const f32x16 twice = scores * (2.0f / cap);
    const f32x16 bounded = twice < 64.0f ? twice : splat(64.0f);
    return splat(cap) - splat(2.0f * cap) / (exp16(bounded) + 1.0f);
}

// One row's scores of keys first_key.. become weights, in place; its peak, total and acc take them in.
void weigh(const Attention& a, const Workspace& work, float* scores, int64_t width, int64_t first_key,
           int64_t row, State& state) {
    const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int64_t first = work.first[row] - first_key, last = work.last[row] - first_key;
    f32x16 s[4];
    f32x16 most = splat(-INFINITY);
    const int vectors = (int)(width / 16);
    for (int j = 0; j < vectors; j++) {
        s[j] = load<f32x16>(scores + j * 16);
        if (a.scales) s[j] *= load<f32x16>(work.k_scales + j * 16);
        if (a.soft_cap != 0.0f) s[j] = capped(s[j], a.soft_cap);
        if (first > j * 16 || last < j * 16 + 15) {
            const i32x16 key = lanes + j * 16;
            const int32_t lo = (int32_t)std::max<int64_t>(first, 0);
            const int32_t hi = (int32_t)std::min<int64_t>(last, width);
            s[j] = (key >= lo) & (key <= hi) ? s[j] : splat(-INFINITY);
        }
        most = max16(most, s[j]);
    }
    const float old = state.peak[row], peak = std::max(old, max_of(most));
    // a row that has seen nothing yet has no peak to subtract
    const float base = peak == -INFINITY ? 0.0f : peak;
    f32x16 total = load<f32x16>(state.total + row * 16);
    if (peak != old) {
        const f32x16 fade = exp16(splat(old - base));
        float* acc = state.acc + row * a.D;
        for (int64_t d = 0; d < a.D; d += 16) store(acc + d, load<f32x16>(acc + d) * fade);
        total *= fade;
        state.peak[row] = peak;
    }
    for (int j = 0; j < vectors; j++) {
        const f32x16 weights = exp16(s[j] - base);
        total += weights;
        store(scores + j * 16, a.scales ? weights * load<f32x16>(work.v_scales + j * 16) : weights);
    }
    store(state.total + row * 16, total);
}

// Blocks of keys first_key.. that hold keys of the span, widened; the next ones are fetched meanwhile.
void spread(const Attention& a, Workspace& work, const int32_t* table, int64_t kv_head, const Span& span,
            int64_t first_key) {
    const int64_t keys = a.tile_keys();
    const int64_t end = std::min(span.end, first_key + keys);
    for (int64_t n = std::max(first_key, span.begin / kBlock * kBlock); n < end; n += kBlock) {
        const int64_t block = table[n / kBlock], at = n - first_key;
        const int64_t next_block = n + kBlock < span.end ? table[n / kBlock + 1] : block;
        const char* k = a.values + block * a.block_stride + kv_head * a.head_bytes;
        const char* next = a.values + next_block * a.block_stride + kv_head * a.head_bytes;
        a.spread_keys(k, next, a.D, work.k + at, keys);
        a.spread_values(k + a.plane_bytes, next + a.plane_bytes, a.D, work.v + at * a.D);
        if (a.scales) {
            const float* scales = a.scales + block * a.scale_stride + kv_head * 2 * kBlock;
            std::copy(scales, scales + kBlock, work.k_scales + at);
            std::copy(scales + kBlock, scales + 2 * kBlock, work.v_scales + at);
        }
    }
}

// The state of `rows` rows after the keys of a span, from nothing.
void walk(const Attention& a, Workspace& work, const Tile& tile, int64_t kv_head, const Span& span,
          State& state) {
    const int64_t rows = tile.count * a.group(), keys = a.tile_keys(), D = a.D;
    state.clear(rows, D);
    for (int64_t row = 0; row < rows; row++) {
        const int64_t position = a.positions[tile.first + row / a.group()];
        work.first[row] = span.sinks ? 0 : std::max(a.sinks, position - a.window + 1);
        work.last[row] = std::min(position, span.end - 1);
    }
    const float* q = span.sinks ? work.q_sink : work.q;
    for (int64_t n = span.begin / keys * keys; n < span.end; n += keys) {
        spread(a, work, a.table + tile.seq * a.table_width, kv_head, span, n);
        const int64_t begin = std::max<int64_t>(span.begin - n, 0), end = std::min(span.end - n, keys);
        const int64_t width = (end + 15) / 16 * 16;
        for (int64_t row = 0; row < rows; row += kMostRows) {
            const int64_t count = std::min<int64_t>(kMostRows, rows - row);
            // rows are in order of position: nobody here sees these keys
            if (work.last[row + count - 1] < n + begin || work.first[row] >= n + end) continue;
            std::fill(work.weights, work.weights + count * keys, 0.0f);
            product(count, {q + row * D, D}, {work.k, keys}, work.weights, keys, D, width);
            for (int64_t i = 0; i < count; i++) weigh(a, work, work.weights + i * keys, width, n, row + i, state);
            const Rows weights{work.weights + begin, keys}, values{work.v + begin * D, D};
            product(count, weights, values, state.acc + row * D, D, end - begin, D);
        }
    }
}

// One state for the keys of both.
void fold(State& sum, const State& part, int64_t rows, int64_t D) {
    for (int64_t row = 0; row < rows; row++) {
        const float peak = std::max(sum.peak[row], part.peak[row]);
        const float base = peak == -INFINITY ? 0.0f : peak;
        const f32x16 fade = exp16(splat(sum.peak[row] - base)), gain = exp16(splat(part.peak[row] - base));
        float *total = sum.total + row * 16, *acc = sum.acc + row * D;
        store(total, fma(load<f32x16>(total), fade, load<f32x16>(part.total + row * 16) * gain));
        for (int64_t d = 0; d < D; d += 16)
            store(acc + d, fma(load<f32x16>(acc + d), fade, load<f32x16>(part.acc + row * D + d) * gain));
        sum.peak[row] = peak;
    }
}

void finish(const Attention& a, const Tile& tile, int64_t kv_head, const State& state) {
    const int64_t group = a.group();
    for (int64_t row = 0; row < tile.count * group; row++) {
        const int64_t head = kv_head * group + row % group;
        float total = sum16(load<f32x16>(state.total + row * 16)), fade = 1.0f;
        if (a.learned) {
            // a key without a value
            const float peak = std::max(state.peak[row], a.learned[head]);
            fade = std::exp(state.peak[row] - peak);
            total = total * fade + std::exp(a.learned[head] - peak);
        }
        const float scale = fade / total;
        bf16* out = a.out + ((tile.first + row / group) * a.heads + head) * a.D;
        const float* acc = state.acc + row * a.D;
        for (int64_t d = 0; d < a.D; d += 16) store_bf16(out + d, load<f32x16>(acc + d) * scale);
    }
}

void load_queries(const Attention& a, const Tile& tile, int64_t kv_head, const bf16* q, int64_t stride,
                  float* out) {
    const int64_t group = a.group(), D = a.D;
    for (int64_t row = 0; row < tile.count * group; row++) {
        const bf16* from = q + (tile.first + row / group) * stride + (kv_head * group + row % group) * D;
        for (int64_t d = 0; d < D; d += 16) store(out + row * D + d, load_bf16(from + d) * a.scale);
    }
}

std::vector<Span> spans_of(const Attention& a, const Tile& tile) {
    std::vector<Span> spans;
    const int64_t end = a.positions[tile.first + tile.count - 1] + 1;
    if (a.sinks) spans.push_back({0, std::min(a.sinks, end), true});
    int64_t begin = std::max(a.sinks, a.positions[tile.first] - a.window + 1);
    for (; begin < end; begin = (begin / kSplit + 1) * kSplit)
        spans.push_back({begin, std::min(end, (begin / kSplit + 1) * kSplit), false});
    return spans;
}

// A tile for one KV head, as one work item or one per span; in the latter case `parts` holds a state per span,
// and who computes the last one merges them.
struct Job {
    Tile tile;
    int64_t kv_head;
    std::vector<Span> spans;
    float* parts = nullptr;
    std::atomic<int> missing{0};

    int64_t rows(const Attention& a) const { return tile.count * a.group(); }

    int64_t part_floats(const Attention& a) const { return spans.size() * State::floats(rows(a), a.D); }

    State part(const Attention& a, size_t span) const {
        return State(parts + span * State::floats(rows(a), a.D), rows(a));
    }
};

Workspace& prepare(const Attention& a, const Job& job) {
    static thread_local Workspace work;
    work.fit(std::max(kRows, a.group()), a.D, a.tile_keys());
    load_queries(a, job.tile, job.kv_head, a.q, a.q_stride, work.q);
    if (a.sinks) load_queries(a, job.tile, job.kv_head, a.q_sink, a.q_sink_stride, work.q_sink);
    return work;
}

void attend(const Attention& a, const Job& job) {
    Workspace& work = prepare(a, job);
    State sum(work.sum, job.rows(a)), part(work.part, job.rows(a));
    sum.clear(job.rows(a), a.D);
    for (const Span& span : job.spans) {
        walk(a, work, job.tile, job.kv_head, span, part);
        fold(sum, part, job.rows(a), a.D);
    }
    finish(a, job.tile, job.kv_head, sum);
}

void attend_span(const Attention& a, Job& job, size_t span) {
    Workspace& work = prepare(a, job);
    State part = job.part(a, span);
    walk(a, work, job.tile, job.kv_head, job.spans[span], part);
    if (--job.missing) return;
    State sum(work.sum, job.rows(a));
    sum.clear(job.rows(a), a.D);
    for (size_t i = 0; i < job.spans.size(); i++) fold(sum, job.part(a, i), job.rows(a), a.D);
    finish(a, job.tile, job.kv_head, sum);
}

// floats: of all states together
void run_spans(const Attention& a, std::vector<Job>& jobs, int64_t floats) {
    static thread_local std::vector<f32x16> memory;
    if ((int64_t)memory.size() < floats / 16) memory.resize(floats / 16);
    std::vector<std::pair<Job*, size_t>> items;
    float* next = (float*)memory.data();
    for (Job& job : jobs) {
        job.parts = next;
        job.missing = (int)job.spans.size();
        next += job.part_floats(a);
        for (size_t i = 0; i < job.spans.size(); i++) items.emplace_back(&job, i);
    }
    parallel((int)items.size(), [&](int i) { attend_span(a, *items[i].first, items[i].second); });
}

void run(const Attention& a, const int32_t* query_start, int64_t sequences) {
    const int32_t tokens = std::max<int32_t>(1, (int32_t)(kRows / a.group()));
    std::vector<Tile> tiles;
    for (int32_t b = 0; b < sequences; b++)
        for (int32_t t = query_start[b]; t < query_start[b + 1]; t += tokens)
            tiles.push_back({b, t, std::min(tokens, query_start[b + 1] - t)});
    // long ones first: the last to finish should be short
    std::sort(tiles.begin(), tiles.end(), [&](const Tile& x, const Tile& y) {
        return a.positions[x.first + x.count - 1] > a.positions[y.first + y.count - 1];
    });
    std::vector<Job> jobs(tiles.size() * a.kv_heads);
    for (size_t i = 0; i < jobs.size(); i++) {
        jobs[i].tile = tiles[i / a.kv_heads];
        jobs[i].kv_head = (int64_t)i % a.kv_heads;
        jobs[i].spans = spans_of(a, jobs[i].tile);
    }
    int64_t floats = 0;
    for (const Job& job : jobs) floats += job.part_floats(a);
    if ((int)jobs.size() < kJobsPerThread * threads() && floats < kMostPartFloats)
        return run_spans(a, jobs, floats);
    parallel((int)jobs.size(), [&](int i) { attend(a, jobs[i]); });
}

}  // namespace
}  // namespace df

// q, q_sink: [T][stride], q_sink null unless sinks have queries of their own; out: [T][heads][D];
// table: [B][table_width]; format: 0 bf16, 1 int8, 2 e4m3. values, scales: see Attention; strides in elements.
// window, sinks, soft_cap: 0 for none. D % 16 == 0.
extern "C" void df_paged_attention(const uint16_t* q, const uint16_t* q_sink, const char* values,
                                   const float* scales, uint16_t* out, const int32_t* table,
                                   const int32_t* query_start, const int64_t* positions, const float* learned,
                                   int64_t sequences, int64_t table_width, int64_t format, int64_t block_stride,
                                   int64_t scale_stride, int64_t heads, int64_t kv_heads, int64_t D,
                                   int64_t q_stride, int64_t q_sink_stride, int64_t window, int64_t sinks,
                                   float scale, float soft_cap) {
    using namespace df;
    const int64_t bytes = format == 0 ? 2 : 1, head_bytes = kBlock * D * bytes;
    const bool apart = sinks && (window || q_sink);
    const Attention a{
        q,
        q_sink ? q_sink : q,
        values,
        scales,
        out,
        table,
        positions,
        learned,
        table_width,
        block_stride * bytes,
        kv_heads * head_bytes,
        head_bytes,
        scale_stride,
        heads,
        kv_heads,
        D,
        q_stride,
        q_sink ? q_sink_stride : q_stride,
        window ? window : kEverything,
        apart ? sinks : 0,
        scale,
        soft_cap,
        format == 0 ? spread_keys<Bf16> : format == 1 ? spread_keys<Int8> : spread_keys<Fp8>,
        format == 0 ? spread_values<Bf16> : format == 1 ? spread_values<Int8> : spread_values<Fp8>,
    };
    run(a, query_start, sequences);
}
DF_RECORDABLE(df_paged_attention)
