//! The tiles of a partition, which are its shards, in closed form.

use crate::{
    error::Result,
    index::{linear::Linear, radix},
    layout::AxisRole,
    partition::Partition,
    room,
    tiling::{
        balance::Balance,
        cells::CutFinder,
        tiles::{Finder, Held, Senders, Tiles},
    },
};

/// The shards of a partition.
pub(crate) struct Shards<'a> {
    partition: &'a Partition,
    /// The addition of each unreduced coordinate to the device index, in order; one 0 if nothing is
    /// unreduced.
    pub(crate) addends: Vec<i64>,
    /// A device's unreduced coordinate, as one number.
    addend: Linear,
    shard: Linear,
}

impl<'a> Shards<'a> {
    pub(crate) fn new(partition: &'a Partition) -> Result<Self> {
        Ok(Self {
            addends: addends(partition)?,
            addend: addend_function(partition),
            shard: partition.layout().shard_id_function(),
            partition,
        })
    }

    /// The device index of the shard's canonical owner.
    fn canonical_owner(&self, shard: i64) -> i64 {
        let index = radix::unravel(shard, self.partition.layout().num_shards());
        index.into_iter().enumerate().map(|(dim, i)| device_part(self.partition, dim, i)).sum()
    }
}

impl Tiles for Shards<'_> {
    fn addends(&self) -> usize {
        self.addends.len()
    }

    fn count(&self) -> usize {
        usize::try_from(self.partition.layout().total_shards()).unwrap_or(usize::MAX)
    }

    fn finder(&self) -> Box<dyn Finder + '_> {
        Box::new(CutFinder::new(self.partition.dims(), self.partition.layout().shard_strides().to_vec()))
    }

    fn senders(&self) -> Result<Box<dyn Senders + '_>> {
        Ok(Box::new(ShardSenders { shards: self, balance: Balance::new(self.partition, self.addends.len()) }))
    }

    fn replicas(&self, tile: i64, addend: usize) -> Result<Vec<i64>> {
        let balance = Balance::new(self.partition, self.addends.len());
        let first = self.canonical_owner(tile) + self.addends[addend];
        let replicas = balance.replicas();
        let mut all = room::list(replicas, format_args!("the {replicas} replicas of a shard"))?;
        all.extend((0..replicas).map(|number| first + balance.step(number)));
        Ok(all)
    }

    fn held_by(&self, tile: i64, holder: i64) -> Option<Held> {
        (self.shard.at(holder) == tile).then(|| Held { holder, piece: 0, addend: self.addend.at(holder) })
    }
}

struct ShardSenders<'a> {
    shards: &'a Shards<'a>,
    balance: Balance,
}

impl Senders for ShardSenders<'_> {
    fn next(&mut self, tile: i64, addend: usize, volume: i64) -> Result<Held> {
        let step = self.shards.addends[addend] + self.balance.replica(tile, addend, || volume)?;
        Ok(Held { holder: self.shards.canonical_owner(tile) + step, piece: 0, addend: addend as i64 })
    }
}

/// The addition of the shard index along `dim` to the device index, the axes that cut nothing being
/// at 0.
pub(crate) fn device_part(partition: &Partition, dim: usize, index: i64) -> i64 {
    let mesh = partition.mesh();
    let mut rest = index;
    let minor_first = partition.layout().specs()[dim].iter().rev();
    minor_first
        .map(|&axis| {
            let digit = rest % mesh.sizes()[axis];
            rest /= mesh.sizes()[axis];
            digit * mesh.strides()[axis]
        })
        .sum()
}

/// The unreduced coordinate of a device, as one number.
pub(crate) fn addend_function(source: &Partition) -> Linear {
    let unreduced = source.layout().unreduced_axes();
    let sizes: Vec<_> = unreduced.iter().map(|&axis| source.mesh().sizes()[axis]).collect();
    let weights = radix::strides(&sizes);
    Linear::new(source.mesh().sizes(), |axis| unreduced.iter().position(|&a| a == axis).map_or(0, |i| weights[i]))
}

/// The addition of each unreduced coordinate to the device index, in order; one 0 if nothing is
/// unreduced.
pub(crate) fn addends(source: &Partition) -> Result<Vec<i64>> {
    let mesh = source.mesh();
    let mut all = vec![0];
    for (axis, role) in source.layout().roles().iter().enumerate() {
        if *role == AxisRole::Unreduced {
            let (size, stride) = (mesh.sizes()[axis], mesh.strides()[axis]);
            let count = usize::try_from(size).unwrap_or(usize::MAX).saturating_mul(all.len());
            let mut more = room::list(count, format_args!("{size} times {} addends", all.len()))?;
            more.extend(all.iter().flat_map(|&base| (0..size).map(move |c| base + c * stride)));
            all = more;
        }
    }
    Ok(all)
}
