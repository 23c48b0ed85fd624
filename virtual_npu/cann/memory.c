/* Device memory and pinned memory: two ranges of host addresses, handed out in granules.
 * A range is reserved once, so that the host reads any device address through one base (see kernels.py). */
#include "device.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { GRANULE = 1 << 16 };

struct region {
    size_t start, size; /* bytes from the range's base */
    bool of_capture;    /* handed out while a graph was captured, so that it belongs to a graph's pool */
    bool counted;
};

struct range {
    char *base;
    size_t size, used, peak, num_regions, room;
    struct region *regions; /* sorted by address */
};

static struct range device, pinned;
static size_t memory_bytes;
static bool host_is_the_limit;

static int reserve(struct range *range, size_t size) {
    void *base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return refuse(ACL_ERROR_RT_MEMORY_ALLOCATION, "cannot reserve %zu bytes", size);
    *range = (struct range){.base = base, .size = size};
    return ACL_SUCCESS;
}

/* bytes = 0 asks for as much as the host has. */
int virtual_npu_memory(size_t bytes) {
    host_is_the_limit = bytes == 0;
    memory_bytes = bytes ? bytes : (size_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
    size_t room = (memory_bytes / GRANULE + 1) * GRANULE * 4; /* addresses only, not memory: holes need some */
    int code = reserve(&device, room);
    return code ? code : reserve(&pinned, room);
}

void *virtual_npu_base(void) { return device.base; }
size_t virtual_npu_span(void) { return device.size; }

static bool within(const struct range *range, const void *address) {
    return (const char *)address >= range->base && (const char *)address < range->base + range->size;
}

static struct region *region_of(const struct range *range, const void *address) {
    if (!within(range, address)) return NULL;
    size_t place = (const char *)address - range->base;
    for (size_t i = 0; i < range->num_regions; i++)
        if (place >= range->regions[i].start && place < range->regions[i].start + range->regions[i].size)
            return &range->regions[i];
    return NULL;
}

/* Returns 0: freed or never handed out; 1: in use; 2: in the pool of a graph. */
int virtual_npu_holds(const void *address) {
    pthread_mutex_lock(&lock);
    const struct region *region = region_of(&device, address);
    int answer = !region ? 0 : region->of_capture ? 2 : 1;
    pthread_mutex_unlock(&lock);
    return answer;
}

bool within_device(const void *address) { return within(&device, address); }
bool within_pinned(const void *address) { return within(&pinned, address); }

static int take(struct range *range, void **address, size_t size, size_t limit, bool of_capture) {
    size = (size / GRANULE + (size % GRANULE != 0)) * GRANULE;
    if (size == 0) size = GRANULE;
    if (size > limit || range->used > limit - size)
        return refuse(ACL_ERROR_RT_MEMORY_ALLOCATION,
                      "out of memory: %zu bytes of %zu are in use, %zu more are asked for", range->used,
                      limit, size);
    size_t start = 0, at = 0;
    while (at < range->num_regions && range->regions[at].start - start < size) {
        start = range->regions[at].start + range->regions[at].size;
        at++;
    }
    if (range->size - start < size)
        return refuse(ACL_ERROR_RT_MEMORY_ALLOCATION, "no hole of %zu bytes is left", size);
    if (range->num_regions == range->room) {
        range->room = range->room ? 2 * range->room : 64;
        range->regions = realloc(range->regions, range->room * sizeof *range->regions);
    }
    memmove(range->regions + at + 1, range->regions + at, (range->num_regions - at) * sizeof *range->regions);
    range->regions[at] = (struct region){start, size, of_capture, true};
    range->num_regions++;
    range->used += size;
    *address = range->base + start;
    return ACL_SUCCESS;
}

static int give_back(struct range *range, void *address) {
    struct region *region = region_of(range, address);
    if (!region || range->base + region->start != (char *)address)
        return refuse(ACL_ERROR_RT_PARAM_INVALID, "%p was not handed out, or is freed twice", address);
    madvise(address, region->size, MADV_DONTNEED);
    range->used -= region->size;
    range->num_regions--;
    memmove(region, region + 1, (range->regions + range->num_regions - region) * sizeof *region);
    return ACL_SUCCESS;
}

aclError aclrtMalloc(void **address, size_t size, aclrtMemMallocPolicy policy) {
    pthread_mutex_lock(&lock);
    int code = take(&device, address, size, memory_bytes, capturing_anywhere());
    pthread_mutex_unlock(&lock);
    return code;
}
aclError aclrtMallocAlign32(void **address, size_t size, aclrtMemMallocPolicy policy) {
    return aclrtMalloc(address, size, policy);
}
aclError aclrtMallocWithCfg(void **address, size_t size, aclrtMemMallocPolicy policy,
                            aclrtMallocConfig *config) {
    return aclrtMalloc(address, size, policy);
}

aclError aclrtFree(void *address) {
    pthread_mutex_lock(&lock);
    int code = give_back(&device, address);
    pthread_mutex_unlock(&lock);
    return code;
}

aclError aclrtMallocHost(void **address, size_t size) {
    pthread_mutex_lock(&lock);
    int code = take(&pinned, address, size, pinned.size, false);
    pthread_mutex_unlock(&lock);
    return code;
}
aclError aclrtMallocHostWithCfg(void **address, uint64_t size, aclrtMallocConfig *config) {
    return aclrtMallocHost(address, size);
}

aclError aclrtFreeHost(void *address) {
    pthread_mutex_lock(&lock);
    int code = give_back(&pinned, address);
    pthread_mutex_unlock(&lock);
    return code;
}

aclError aclrtPointerGetAttributes(const void *address, aclrtPtrAttributes *attributes) {
    memset(attributes, 0, sizeof *attributes);
    attributes->location.type = within(&device, address)   ? ACL_MEM_LOCATION_TYPE_DEVICE
                                : within(&pinned, address) ? ACL_MEM_LOCATION_TYPE_HOST
                                                           : ACL_MEM_LOCATION_TYPE_UNREGISTERED;
    return ACL_SUCCESS;
}

static size_t available_on_host(void) {
    char line[128];
    size_t kib = 0;
    FILE *file = fopen("/proc/meminfo", "r");
    if (!file) return memory_bytes;
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "MemAvailable: %zu kB", &kib) == 1) break;
    fclose(file);
    return kib * 1024;
}

aclError aclrtGetMemInfo(aclrtMemAttr kind, size_t *free_bytes, size_t *total_bytes) {
    pthread_mutex_lock(&lock);
    *total_bytes = memory_bytes;
    *free_bytes = memory_bytes - device.used;
    pthread_mutex_unlock(&lock);
    size_t available = host_is_the_limit ? available_on_host() : memory_bytes;
    if (available < *free_bytes) *free_bytes = available;
    return ACL_SUCCESS;
}
