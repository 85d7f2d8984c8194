//! The choice of the replica of a shard that sends.
//!
//! Each transfer goes to the replica that has sent the fewest elements so far, the one of lowest device index among
//! equals. The replicas of a shard serve no other shard, so this is list scheduling on `r` machines: the busiest replica
//! sends at most the mean plus `(1 - 1/r)` of the largest transfer, and at most `2 - 1/r` times what the best assignment
//! achieves (Graham, "Bounds on multiprocessing timing anomalies", 1969). Transfers of one size, which is what even
//! partitions give, are shared out perfectly.

use std::{cmp::Reverse, collections::BinaryHeap};

use crate::{error::Result, partition::Partition, room::Room as _};

/// Shares the sending among replicas.
pub(crate) struct Balance {
    /// Sizes and strides of the axes that replicate.
    axes: Vec<(i64, i64)>,
    replicas: i64,
    addends: usize,
    /// For each shard and addend: what its replicas have sent, and the device index each adds. Replicas that
    /// have sent nothing are not in it yet.
    sent: Vec<BinaryHeap<Reverse<(i64, i64, i64)>>>,
}

impl Balance {
    pub(crate) fn new(source: &Partition, addends: usize) -> Self {
        let mesh = source.mesh();
        let axes: Vec<_> = (source.layout().replicated_axes().into_iter())
            .map(|axis| (mesh.sizes()[axis], mesh.strides()[axis]))
            .filter(|&(size, _)| size > 1)
            .collect();
        Self { replicas: axes.iter().map(|(size, _)| size).product(), axes, addends, sent: Vec::new() }
    }

    /// The addition to the device index of the shard's canonical owner, for the next transfer out
    /// of it.
    pub(crate) fn replica(&mut self, shard: i64, addend: usize, volume: impl FnOnce() -> i64) -> Result<i64> {
        if self.replicas == 1 {
            return Ok(0);
        }
        let slot = shard as usize * self.addends + addend;
        if slot >= self.sent.len() {
            let more = slot + 1 - self.sent.len();
            self.sent.room(more, format_args!("the loads of {slot} shards"))?;
            self.sent.resize_with(slot + 1, BinaryHeap::new);
        }
        let heap = &mut self.sent[slot];
        let unused = heap.len() as i64;
        let (load, number, step) = if unused < self.replicas {
            (0, unused, self.step(unused))
        } else {
            heap.pop().map_or((0, 0, 0), |Reverse(least)| least)
        };
        self.sent[slot].push(Reverse((load.saturating_add(volume()), number, step)));
        Ok(step)
    }

    /// The number of replicas of each addend of a shard.
    pub(crate) fn replicas(&self) -> i64 {
        self.replicas
    }

    /// The addition of replica `number` to the device index.
    pub(crate) fn step(&self, mut number: i64) -> i64 {
        let mut step = 0;
        for &(size, stride) in self.axes.iter().rev() {
            step += number % size * stride;
            number /= size;
        }
        step
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{layout::Layout, mesh::Mesh, uneven::Uneven};
    use std::sync::Arc;

    #[test]
    fn each_shard_and_addend_is_sent_by_its_replicas_in_turn_and_then_by_whom_has_sent_least() {
        let mesh = Arc::new(Mesh::new(&["x", "y", "z"], &[2, 2, 3]).unwrap());
        let source = Partition::new(Arc::new(Layout::new(mesh, &[["x"]], &[]).unwrap()), &[2], Uneven::Even).unwrap();
        let mut balance = Balance::new(&source, 3);
        // The first six in the order of the devices; then all have sent 1 but the first, which has sent 9.
        for (turn, expected) in [0, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1].into_iter().enumerate() {
            for (shard, addend) in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)] {
                let volume = if turn == 0 { 9 } else { 1 };
                assert_eq!(balance.replica(shard, addend, || volume), Ok(expected), "{turn} of {shard} and {addend}");
            }
        }
    }
}
