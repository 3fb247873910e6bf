/* store_threads.h: threads that move bytes between the memory of a store and its file. */
#ifndef GRADCKPT_STORE_THREADS_H
#define GRADCKPT_STORE_THREADS_H

/* What one does; the argument is the store. */
void *gck_store_run(void *store);

#endif
