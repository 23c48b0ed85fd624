// Access to x86's AMX, which adds products of bfloat16 pairs to 16 x 16 float32 sums at a time.
//
// A tile register has 16 rows of 64 bytes. It holds 16 rows of x with 16 pairs each, 16 pairs of a weight's inputs for
// 16 outputs, or 16 x 16 sums in float32. One instruction adds the products of 16 pairs to each sum: it sums the
// products of the first numbers of the pairs and those of the second numbers separately, each in the order of the
// pairs, and then adds the total of both to the sum. It takes numbers smaller than 2^-126 for zeros.

#pragma once

#include <cstdint>

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define HAS_AMX
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

constexpr long AMX_ROWS = 16, AMX_WORDS = 16;  // rows of a register, and 32-bit words of a row

// Whether this process may use AMX: the kernel is asked for permission once.
inline bool may_use_amx() {
    constexpr long ASK = 0x1023, SUMS_AND_NUMBERS = 18;  // ARCH_REQ_XCOMP_PERM of arch_prctl(2), XFEATURE_XTILE_DATA
    static const bool may = syscall(SYS_arch_prctl, ASK, SUMS_AND_NUMBERS) == 0;
    return may;
}

// A barrier: the compiler does not know which memory tile loads read, so earlier writes must have reached it.
inline void amx_memory() { asm volatile("" : : : "memory"); }

// Configures this thread's tile registers to their full size for as long as it lives, if they are used.
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
        amx_memory();  // The compiler knows of only a part of the configuration
    }
    ~AmxRegisters() {
        if (is_used) _tile_release();
    }
    AmxRegisters(const AmxRegisters&) = delete;
    const bool is_used;
};

#endif
