// Runs a recorded program: calls one after the other, without a word of Python between them.
#include <cstdint>

namespace {

struct Call {
    void (*run)(const uint64_t*);
    const uint64_t* words;
};

}  // namespace

extern "C" void df_replay(const void* calls, int64_t count) {
    const Call* call = (const Call*)calls;
    for (int64_t i = 0; i < count; i++) call[i].run(call[i].words);
}
