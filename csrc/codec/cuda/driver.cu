/* driver.cu: facts about the CUDA this was built with and the driver it meets. */
#include "codec/cuda/launch.cuh"

#ifndef GCK_CUDA_ARCHS
#error "pass -DGCK_CUDA_ARCHS=\"75;80;...\", the architectures of this build"
#endif

extern "C" {

const char *gck_cuda_archs(void) { return GCK_CUDA_ARCHS; }

/* Within a major version any driver runs any runtime (CUDA's minor version compatibility).  Absent
 * drivers report version 0. */
int gck_cuda_check(int *driver, int *runtime)
{
    *driver = *runtime = 0;
    const cudaError_t runtime_status = cudaRuntimeGetVersion(runtime);
    const cudaError_t driver_status = cudaDriverGetVersion(driver);

    (void)cudaGetLastError();                      /* of these two: said here, and not by the next launch */
    if (runtime_status != cudaSuccess) {
        return (int)runtime_status;
    }
    return driver_status != cudaSuccess || *driver / 1000 < *runtime / 1000 ? GCK_E_DRIVER : GCK_OK;
}

}
