/* front.c: all plans of a chain. */
#include "planner/front.h"

#include <stdlib.h>
#include <string.h>

void gck_front_free(gck_front *front)
{
    if (front == NULL) {
        return;
    }
    while (front->n_passes > 0) {
        gck_front_drop_pass(front);
    }
    free(front->passes);
    free(front->ends);
    gck_labels_free(&front->plans);
    gck_labels_free(&front->exact);
    free(front);
}

int gck_front_add_pass(gck_front *front, int64_t end)
{
    gck_pass *passes = gck_planner_memory(front->n_passes + 1, sizeof *passes);
    gck_step **steps = gck_planner_memory(end, sizeof *steps);

    if (passes == NULL || steps == NULL) {
        free(passes);
        free(steps);
        return GCK_E_MEMORY;
    }
    for (int64_t l = 0; l < end; l++) {
        steps[l] = NULL;
    }
    if (front->n_passes > 0) {
        memcpy(passes, front->passes, (size_t)front->n_passes * sizeof *passes);
    }
    free(front->passes);
    front->passes = passes;
    front->passes[front->n_passes++] = (gck_pass){steps, end};
    return GCK_OK;
}

void gck_front_drop_pass(gck_front *front)
{
    const gck_pass *pass = &front->passes[--front->n_passes];

    for (int64_t l = 0; l < pass->end; l++) {
        free(pass->steps[l]);
    }
    free(pass->steps);
}

int gck_front_keep_steps(gck_front *front, int64_t region, const gck_labels *labels)
{
    gck_step *steps = gck_planner_memory(labels->n, sizeof *steps);

    if (steps == NULL) {
        return GCK_E_MEMORY;
    }
    front->passes[front->n_passes - 1].steps[region] = steps;
    for (int64_t i = 0; i < labels->n; i++) {
        steps[i] = (gck_step){labels->at[i].from, labels->at[i].option};
    }
    return GCK_OK;
}

int64_t gck_front_find(const gck_front *front, int64_t budget, int64_t error_budget)
{
    const gck_label *plans = front->plans.at;
    int64_t found = -1;

    for (int64_t i = 0; i < front->plans.n && plans[i].bytes <= budget; i++) {
        if (plans[i].error <= error_budget && (found < 0 || plans[i].time < plans[found].time)) {
            found = i;
        }
    }
    return found;
}

int64_t gck_front_least(const gck_front *front, int64_t error_budget)
{
    for (int64_t i = 0; i < front->plans.n; i++) {
        if (front->plans.at[i].error <= error_budget) {
            return front->plans.at[i].bytes;
        }
    }
    return GCK_UNAVAILABLE;
}

void gck_front_choices_from(const gck_front *front, const gck_label *label, uint32_t pass, uint32_t *choices)
{
    gck_step step = {label->from, label->option};

    for (int64_t l = 0; l < front->chain->regions; l++) {
        choices[l] = step.option;
        if (l + 1 < front->chain->regions) {
            pass = l + 1 < front->passes[pass].end ? pass : 0;
            step = front->passes[pass].steps[l + 1][step.from];
        }
    }
}

void gck_front_choices(const gck_front *front, int64_t plan, uint32_t *choices)
{
    gck_label label = front->plans.at[plan];
    uint32_t pass = 0;

    if (front->ends != NULL) {
        pass = front->ends[label.from].pass;
        label.from = front->ends[label.from].from;
    }
    gck_front_choices_from(front, &label, pass, choices);
}
