/* The native half of the demo application: burns CPU and calls back into managed code once a block.
 * Built with -O2 -fomit-frame-pointer, so that only unwind tables lead through it. */
#include <stdint.h>

typedef uint32_t (*block_callback)(uint32_t block, uint32_t checksum);

__attribute__((visibility("default"), noinline))
uint32_t shop_encode(uint32_t blocks, block_callback on_block)
{
    uint32_t checksum = 1;
    for (uint32_t block = 0; block < blocks; block++) {
        for (uint32_t i = 0; i < 40000; i++) {
            checksum = (checksum * 16777619u) ^ (i + block);
            __asm__ volatile("" : "+r"(checksum)); /* keeps the loop as it is written */
        }
        checksum ^= on_block(block, checksum);
    }
    return checksum; /* the last xor keeps the callback from being a tail call */
}
