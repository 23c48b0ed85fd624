// Products of 16 x 16 sums at a time by x86's AMX, from pairs of bfloat16.
//
// A register is 16 rows of 64 bytes: 16 rows of 16 pairs of x, 16 pairs of 16 outputs of a weight, or 16 x 16 sums in
// float32. An instruction adds to each sum what 16 pairs give: those of the first of each pair and those of the second
// are summed apart, each in the order of the pairs, and their total is added to the sum. Numbers under 2^-126 are zeros.

#pragma once

#include <cstdint>

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define HAS_AMX
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

constexpr long AMX_ROWS = 16, AMX_WORDS = 16;  // of a register

// Whether this process may use them, for which the kernel is asked once.
inline bool may_use_amx() {
    constexpr long ASK = 0x1023, SUMS_AND_NUMBERS = 18;  // ARCH_REQ_XCOMP_PERM of arch_prctl(2), XFEATURE_XTILE_DATA
    static const bool may = syscall(SYS_arch_prctl, ASK, SUMS_AND_NUMBERS) == 0;
    return may;
}

// The compiler does not know which memory the loads of registers read: what was written before is in memory after this.
inline void amx_memory() { asm volatile("" : : : "memory"); }

// While it lives, this thread's registers are whole ones, if they are used.
struct AmxRegisters {
    explicit AmxRegisters(bool is_used = true) : is_used(is_used) {
        if (!is_used) return;
        alignas(64) struct {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes_of_row[16] = {};
            uint8_t rows[16] = {};
        } config;
        static_assert(sizeof(config) == 64);
        for (int i = 0; i < 8; i++) config.bytes_of_row[i] = 4 * AMX_WORDS, config.rows[i] = AMX_ROWS;
        asm volatile("" : : "r"(&config) : "memory");
        _tile_loadconfig(&config);
        amx_memory();  // The compiler knows of a part of the configuration only
    }
    ~AmxRegisters() {
        if (is_used) _tile_release();
    }
    AmxRegisters(const AmxRegisters&) = delete;
    const bool is_used;
};

#endif
