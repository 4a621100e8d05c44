/* -- the order of clusters ----------------------------------------------------------------------------------------- */
/* SMs of a GPC merge their reads of the same bytes, but consecutive clusters run on different GPCs. So the clusters of a
 * GPC get consecutive tiles. A probe finds them, whose CTAs write their SMs and take a whole one. Any order is right. */
static inline int <!-- name -->_probe_(<!-- name -->_kernels *kernels, int size, int clusters, uint32_t *sms) {
    CUlaunchAttribute attribute = <!-- name -->_cluster_(size);
    CUlaunchConfig config = <!-- name -->_config_(<!-- name -->_COUNT_ - 1, size * clusters, &attribute);
    void *parameters[1];
    parameters[0] = &sms;
    config.hStream = CU_STREAM_PER_THREAD;
    return !kernels->driver.cuLaunchKernelEx(&config, kernels->functions[<!-- name -->_COUNT_ - 1], parameters, NULL) &&
           !kernels->driver.cuStreamSynchronize(CU_STREAM_PER_THREAD);
}

static inline void <!-- name -->_place_(<!-- name -->_kernels *kernels) {
    static const int sizes[] = {16, 12, 10, 8, 6, 4};
    uint32_t gpcs[1024], *sms, *again, gpc, sm; /* of each SM; the CTAs of a cluster run on one GPC */
    void *memory;
    size_t i, is_placed;
    int size, count, c, moved;
    if (kernels->sms > 512 || kernels->driver.cuMemHostAlloc(&memory, 4096, 0)) return;
    sms = (uint32_t *)memory, again = sms + 512;
    (void)kernels->driver.cuFuncSetAttribute(
        kernels->functions[<!-- name -->_COUNT_ - 1], CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1);
    for (sm = 0; sm < 1024; ++sm) gpcs[sm] = sm;
    for (i = 0; i < sizeof sizes / sizeof *sizes; ++i) {
        size = sizes[i], count = (int)kernels->sms / size * size;
        if (!<!-- name -->_probe_(kernels, size, count / size, sms)) continue;
        for (c = 0; c < count; ++c) {
            const uint32_t a = gpcs[sms[c] % 1024], b = gpcs[sms[c - c % size] % 1024];
            for (sm = 0; sm < 1024; ++sm)
                if (gpcs[sm] == a || gpcs[sm] == b) gpcs[sm] = a < b ? a : b;
        }
    }
    for (i = 0; i < <!-- name -->_COUNT_ - 1; ++i) {
        unsigned char taken[1024] = {0};
        size = <!-- name -->_kernels_[i].cluster, count = (int)kernels->sms / size;
        if (size == 1) continue;
        if (count > kernels->resident[i]) count = (int)kernels->resident[i];
        is_placed = <!-- name -->_probe_(kernels, size, count, sms) && <!-- name -->_probe_(kernels, size, count, again);
        for (c = moved = 0; is_placed && c < count * size; ++c) { /* unless other kernels occupy SMs */
            moved += sms[c] != again[c];
            is_placed = !taken[sms[c] % 1024]++ && moved * 10 < count * size;
        }
        for (gpc = 0; is_placed && gpc < 1024; ++gpc)
            for (c = 0; c < count; ++c)
                if (gpcs[sms[c * size] % 1024] == gpc) kernels->by_gpc[i][kernels->placed[i]++] = (uint16_t)c;
    }
    kernels->driver.cuMemFreeHost(memory);
}

/* The place of each of a kernel's clusters in the order of the tiles. */
static inline void <!-- name -->_order_(const <!-- name -->_kernels *kernels, size_t kernel, int64_t clusters, uint16_t *order) {
    uint16_t i, place = 0;
    for (i = 0; i < <!-- most -->; ++i) order[i] = i;
    if (clusters <= kernels->placed[kernel])
        for (i = 0; i < kernels->placed[kernel]; ++i)
            if (kernels->by_gpc[kernel][i] < clusters) order[kernels->by_gpc[kernel][i]] = place++;
}
