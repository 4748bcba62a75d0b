#ifndef RINGFENCE_FRAME_LAYOUT_H
#define RINGFENCE_FRAME_LAYOUT_H

/* Sizes and offsets of frames (spec/link.md, section 4). */

#include "core.h"

#include <endian.h>
#include <string.h>

#define HEADER_BYTES 88
#define HOP_BYTES 16
#define TAG_BYTES 16
#define COUNTER_AT 40
#define COUNTER_END 48
#define INSTANCE_AT 48
#define INSTANCE_BYTES 16
#define CALL_AT 64
#define CALL_BYTES 24
#define KEY_PHASE_SHIFT 20
#define SEGMENT_BYTES (256 * 1024)
#define FRAME_BYTES (HEADER_BYTES + SEGMENT_BYTES + 2 * TAG_BYTES)
#define NO_ORIGIN 0xFFFFFFFFu
#define SHARED_FROM_BYTES (32 * 1024) /* payload from which shared memory is used */
#define MAX_SLOTS 256
#define SEGMENTS_AT_ONCE 8 /* through shared memory, before other links have their turn; their headers are written at once */

enum { HOP = 1, FORWARD = 2, BYE = 6, NOP = 7, SHARED = 8, RETURN = 9 };

static inline void put32(unsigned char *at, uint32_t value) {
    value = htobe32(value);
    memcpy(at, &value, 4);
}

static inline void put64(unsigned char *at, uint64_t value) {
    value = htobe64(value);
    memcpy(at, &value, 8);
}

#endif
