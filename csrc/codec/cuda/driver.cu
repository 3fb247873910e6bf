/* driver.cu: facts about the CUDA this was built with and the driver it meets. */
#include "codec/cuda/launch.cuh"

#ifndef GCK_CUDA_ARCHS
#error "pass -DGCK_CUDA_ARCHS=\"75;80;...\", the architectures of this build"
#endif
/* The oldest driver that loads binaries compressed as these are; 0: any of the runtime's major
 * version. */
#ifndef GCK_CUDA_LEAST_DRIVER
#define GCK_CUDA_LEAST_DRIVER 0
#endif

extern "C" {

const char *gck_cuda_archs(void) { return GCK_CUDA_ARCHS; }

/* Within a major version any driver runs any runtime (CUDA's minor version compatibility), but
 * binaries that nvcc compressed with --compress-mode need the driver of CUDA 12.4.  Absent drivers
 * report version 0. */
int gck_cuda_check(int *driver, int *runtime)
{
    *driver = *runtime = 0;
    const cudaError_t runtime_status = cudaRuntimeGetVersion(runtime);
    const cudaError_t driver_status = cudaDriverGetVersion(driver);
    const int least = *runtime / 1000 * 1000 > GCK_CUDA_LEAST_DRIVER ? *runtime / 1000 * 1000 : GCK_CUDA_LEAST_DRIVER;

    (void)cudaGetLastError();                      /* of these two: said here, and not by the next launch */
    if (runtime_status != cudaSuccess) {
        return (int)runtime_status;
    }
    return driver_status != cudaSuccess || *driver < least ? GCK_E_DRIVER : GCK_OK;
}

}
