//! The order in which FSDP2 would enqueue a micro-step: pure, one list of actions [TIDE §5.1, §5.3].

use tide_gpu::plan::Mode;

/// One thing that the host enqueues, on every rank. A layer is its place in forward order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Issue the layer's all-gather into its ring slot.
    Gather(usize),
    /// Compute its forward, once it is gathered.
    Forward(usize),
    /// Compute its forward again, within the residency that its backward uses.
    Recompute(usize),
    /// Compute its gradients, into memory taken for them.
    Backward(usize),
    /// Give its parameters up once all computed so far is over.
    Reshard(usize),
    /// Copy its gradients into the slot that it has left, and free theirs.
    Store(usize),
    /// Enqueue its reduce-scatter, and whatever its reads set free.
    Reduce(usize),
    /// Free its gradients, which are reused only once the reduce-scatter has read them.
    Free(usize),
}

/// Forward and backward of one micro-step over `layers` layers.
pub fn micro_step(layers: usize, mode: Mode, checkpoint: bool) -> Vec<Action> {
    let mut actions = vec![Action::Gather(0)];
    for layer in 0..layers {
        // Depth 1: the next layer travels while this one computes.
        if layer + 1 < layers {
            actions.push(Action::Gather(layer + 1));
        }
        actions.push(Action::Forward(layer));
        // The last one stays for backward, which begins with it (ring-tail folding).
        if layer + 1 < layers {
            actions.push(Action::Reshard(layer));
        }
    }
    for layer in (0..layers).rev() {
        pre_backward(&mut actions, layers, layer, mode);
        if checkpoint {
            actions.push(Action::Recompute(layer));
        }
        actions.push(Action::Backward(layer));
        post_backward(&mut actions, layers, layer, mode);
    }
    if mode == Mode::InPlace {
        actions.push(Action::Free(0));
    }
    actions
}

/// In place, the layer's successor in backward was gathered by the layer before, but for the first.
fn pre_backward(actions: &mut Vec<Action>, layers: usize, layer: usize, mode: Mode) {
    let is_first = layer + 1 == layers;
    if layer > 0 && (mode == Mode::SlotReuse || is_first) {
        actions.push(Action::Gather(layer - 1));
    }
}

fn post_backward(actions: &mut Vec<Action>, layers: usize, layer: usize, mode: Mode) {
    actions.push(Action::Reshard(layer));
    match mode {
        Mode::InPlace => {
            // Into the slot just left, ahead of the network phase.
            if layer > 1 {
                actions.push(Action::Gather(layer - 2));
            }
            if layer + 1 < layers {
                actions.push(Action::Free(layer + 1));
            }
            actions.push(Action::Reduce(layer));
        }
        Mode::SlotReuse => actions.extend([Action::Store(layer), Action::Reduce(layer)]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODES: [Mode; 2] = [Mode::InPlace, Mode::SlotReuse];

    /// Walks a few micro-steps and keeps book of slots, residency and gradients.
    struct Book {
        mode: Mode,
        slots: [Option<usize>; 2],
        gradients: Vec<usize>,
        gradients_max: usize,
        reduced: Vec<usize>,
    }

    impl Book {
        fn act(&mut self, action: Action) {
            match action {
                Action::Gather(g) => {
                    assert_eq!(self.slots[g % 2], None, "{action:?} into an occupied slot");
                    self.slots[g % 2] = Some(g);
                }
                Action::Forward(g) | Action::Recompute(g) => assert_eq!(self.slots[g % 2], Some(g), "{action:?}"),
                Action::Backward(g) => {
                    assert_eq!(self.slots[g % 2], Some(g), "{action:?}");
                    self.gradients.push(g);
                    self.gradients_max = self.gradients_max.max(self.gradients.len());
                }
                Action::Reshard(g) => assert_eq!(self.slots[g % 2].take(), Some(g), "{action:?}"),
                Action::Store(g) => {
                    assert_eq!(self.slots[g % 2], None, "{action:?} over parameters");
                    self.free(g);
                    self.slots[g % 2] = Some(g);
                }
                Action::Reduce(g) => {
                    self.reduced.push(g);
                    match self.mode {
                        Mode::InPlace => assert!(self.gradients.contains(&g), "{action:?} of freed gradients"),
                        Mode::SlotReuse => assert_eq!(self.slots[g % 2].take(), Some(g), "{action:?}"),
                    }
                }
                Action::Free(g) => self.free(g),
            }
        }

        fn free(&mut self, layer: usize) {
            let at = self.gradients.iter().position(|&g| g == layer).expect("gradients that are live");
            self.gradients.remove(at);
        }
    }

    #[test]
    fn slots_residency_and_gradients_fit_together_for_any_number_of_layers() {
        for mode in MODES {
            for (layers, checkpoint) in (1..10).flat_map(|n| [(n, false), (n, true)]) {
                let mut book =
                    Book { mode, slots: [None; 2], gradients: Vec::new(), gradients_max: 0, reduced: Vec::new() };
                for _ in 0..3 {
                    micro_step(layers, mode, checkpoint).into_iter().for_each(|action| book.act(action));
                    assert_eq!(book.slots, [None; 2], "nothing outlives a micro-step");
                    assert!(book.gradients.is_empty());
                    assert_eq!(std::mem::take(&mut book.reduced), (0..layers).rev().collect::<Vec<_>>());
                }
                let groups = if mode == Mode::InPlace { layers.min(2) } else { 1 };
                assert_eq!(book.gradients_max, groups, "{mode} {layers}");
            }
        }
    }

    #[test]
    fn the_last_layer_is_gathered_once_and_every_other_again_in_backward() {
        for mode in MODES {
            let actions = micro_step(5, mode, true);
            let count = |action| actions.iter().filter(|&&a| a == action).count();
            assert_eq!((0..5).map(|g| count(Action::Gather(g))).collect::<Vec<_>>(), [2, 2, 2, 2, 1]);
            assert!((0..5).all(|g| count(Action::Recompute(g)) == 1 && count(Action::Forward(g)) == 1));
        }
    }

    #[test]
    fn in_place_gathers_ahead_of_the_reduce_scatter_and_slot_reuse_behind_its_reads() {
        let at = |actions: &[Action], action| actions.iter().rposition(|&a| a == action).unwrap();
        let in_place = micro_step(4, Mode::InPlace, false);
        assert!(at(&in_place, Action::Gather(1)) < at(&in_place, Action::Reduce(3)));
        let reuse = micro_step(4, Mode::SlotReuse, false);
        assert!(at(&reuse, Action::Gather(1)) > at(&reuse, Action::Reduce(3)));
        assert!(at(&reuse, Action::Gather(1)) < at(&reuse, Action::Backward(2)), "depth 1");
    }
}
