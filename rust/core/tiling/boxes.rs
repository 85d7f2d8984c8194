//! Explicit boxes: the chunks of a checkpoint, what a reader asks for.

use std::sync::{Arc, OnceLock};

use crate::{
    error::{Error, Result},
    region::{Region, Regions},
    room::{self, Room as _},
    shown::counted,
    tiling::{
        Piece, Pieces, Place, Poll, STEPS_PER_POLL, Tiling, check::missing, checked_holder, checked_shape, grid::Grid,
        listed::Listed, tiles::Tiles,
    },
};

/// The array in which a holder has its boxes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Array {
    /// The array of its one box.
    Own,
    /// One dim, with the boxes one after the other, each in C order.
    Flat,
    /// An array of `shape`. If it has the tensor's rank, `starts` has the position of each box's first element in it, box
    /// by box; else it has one dim, and `starts` the offset of each.
    Given {
        /// The array's shape.
        shape: Vec<i64>,
        /// The start of each box.
        starts: Vec<i64>,
    },
}

/// Holders with any boxes.
///
/// ```
/// use shardwise_core::{error::Error, parallel::never, region::Regions, tiling::{Tiling, boxes::Boxes}};
/// let boxes = |bounds: &[i64]| Boxes::one_each(&[5], Regions::of_bounds(1, 2, bounds)?, false);
/// assert_eq!(boxes(&[0, 2, 2, 5])?.check(&mut never), Ok(()));
/// let gap = Err(Error::BoxMissing { start: vec![2], stop: vec![3] });
/// assert_eq!(boxes(&[0, 2, 3, 5])?.check(&mut never), gap);
/// let twice = Err(Error::BoxesOverlap { first: 0, second: 1, start: vec![2], stop: vec![3] });
/// assert_eq!(boxes(&[0, 3, 2, 5])?.check(&mut never), twice);
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug)]
pub struct Boxes {
    shape: Vec<i64>,
    pieces: Arc<Pieces>,
    /// The shapes of the holders' arrays, each with where it begins; `None` if each holder has one box and its array.
    arrays: Option<(Vec<usize>, Vec<i64>)>,
    replicas: bool,
    tiles: OnceLock<Listed>,
}

/// One holder for each of the `count` boxes of `bounds`, (boxes, dims, 2) in C order, with an array of its own: if they are
/// the chunks of a grid, the grid, of which nothing needs to be listed.
///
/// # Errors
/// As [`Boxes::one_each`]; [`Error::Length`] if `bounds` are not so many boxes.
pub fn one_each(shape: &[i64], count: usize, bounds: &[i64], replicas: bool) -> Result<Arc<dyn Tiling>> {
    match Grid::of_bounds(shape, count, bounds) {
        Some(grid) => Ok(Arc::new(grid)),
        None => Ok(Arc::new(Boxes::one_each(shape, Regions::of_bounds(shape.len(), count, bounds)?, replicas)?)),
    }
}

impl Boxes {
    /// One holder for each box, with an array of its own.
    ///
    /// # Errors
    /// [`Error::NegativeDim`], [`Error::Overflow`]; [`Error::BoxBounds`] for a box that is not within the tensor;
    /// [`Error::TooMany`] if there is no memory for the list.
    pub fn one_each(shape: &[i64], regions: Regions, replicas: bool) -> Result<Self> {
        checked_shape(shape)?;
        for (holder, region) in with_bounds(&regions) {
            check_bounds(shape, holder, 0, region)?;
        }
        let (shape, pieces) = (shape.to_vec(), Arc::new(Pieces::one_each(regions)?));
        Ok(Self { shape, pieces, arrays: None, replicas, tiles: OnceLock::new() })
    }

    /// Holders with any number of boxes each.
    ///
    /// # Errors
    /// As [`Boxes::one_each`]; [`Error::Places`] if the boxes of a holder do not lie within its array, or two of them in
    /// the same place; what `poll` returns.
    pub fn new(shape: &[i64], holders: &[(Regions, Array)], replicas: bool, poll: Poll<'_>) -> Result<Self> {
        checked_shape(shape)?;
        let mut pieces = Pieces::new(shape.len());
        let what = "the holders of boxes";
        let (mut begins, mut shapes) = (room::list(holders.len() + 1, what)?, Vec::new());
        begins.push(0);
        for (holder, (regions, array)) in holders.iter().enumerate() {
            if holder % STEPS_PER_POLL == 0 {
                poll()?;
            }
            for (piece, region) in with_bounds(regions) {
                check_bounds(shape, holder, piece, region)?;
            }
            let own = place(holder, regions, array, shape.len(), &mut pieces, poll)?;
            pieces.end_holder()?;
            shapes.room(own.len(), what)?;
            shapes.extend(own);
            begins.push(shapes.len());
        }
        let (shape, pieces) = (shape.to_vec(), Arc::new(pieces));
        Ok(Self { shape, pieces, arrays: Some((begins, shapes)), replicas, tiles: OnceLock::new() })
    }

    /// The index, which is made once.
    fn listed(&self, poll: Poll<'_>) -> Result<&Listed> {
        if let Some(listed) = self.tiles.get() {
            return Ok(listed);
        }
        let listed = Listed::new(self.pieces.clone(), self.replicas, poll)?;
        Ok(self.tiles.get_or_init(|| listed))
    }
}

/// The boxes whose bounds can be wrong, with their numbers. Boxes of no dims have none, and there may be any number of them.
fn with_bounds(regions: &Regions) -> impl Iterator<Item = (usize, Region<'_>)> {
    regions.iter().enumerate().take(if regions.rank() == 0 { 0 } else { regions.len() })
}

fn check_bounds(shape: &[i64], holder: usize, piece: usize, region: Region<'_>) -> Result<()> {
    for (dim, ((start, stop), &size)) in region.sides().zip(shape).enumerate() {
        if start < 0 || start > stop || stop > size {
            return Err(Error::BoxBounds { holder, piece, dim, start, stop, size });
        }
    }
    Ok(())
}

/// Adds a holder's pieces with their places, and gives the shape of its array.
fn place(
    holder: usize,
    regions: &Regions,
    array: &Array,
    rank: usize,
    pieces: &mut Pieces,
    poll: Poll<'_>,
) -> Result<Vec<i64>> {
    let wrong = |what: String| Error::Places { holder, what };
    match array {
        Array::Own => {
            if regions.len() != 1 {
                return Err(wrong(format!("has {} boxes, but only one can have an array of its own", regions.len())));
            }
            let origin = vec![0; rank];
            pieces.push(Piece { region: regions.get(0), place: Place::At(&origin) })?;
            Ok(regions.get(0).extents().collect())
        }
        Array::Flat => {
            let mut offset = 0_i64;
            pieces.reserve_flat(regions.len())?;
            for region in regions.iter() {
                pieces.push(Piece { region, place: Place::Flat(offset) })?;
                offset = offset
                    .checked_add(region.elements()?)
                    .ok_or_else(|| Error::Overflow { what: format!("the number of elements of holders[{holder}]") })?;
            }
            Ok(vec![offset])
        }
        Array::Given { shape, starts } => {
            let flat = shape.len() == 1 && rank != 1;
            let numbers = if flat { 1 } else { rank };
            if !flat && shape.len() != rank {
                return Err(wrong(format!("has an array of rank {}; it must have rank {rank} or 1", shape.len())));
            }
            if starts.len() != regions.len() * numbers {
                let boxes = counted(&regions.len(), "box", "boxes");
                let wanted = counted(&(regions.len() * numbers), "number", "numbers");
                return Err(wrong(format!("has {boxes}, whose starts are {wanted}, not {}", starts.len())));
            }
            checked_shape(shape)?;
            if shape.is_empty() && regions.len() > 1 {
                return Err(wrong("has its boxes 0 and 1 in the same place".to_owned()));
            }
            let mut local = Regions::new(shape.len());
            for (piece, region) in regions.iter().enumerate() {
                let start = &starts[piece * numbers..(piece + 1) * numbers];
                let extents: Vec<i64> = if flat { vec![region.elements()?] } else { region.extents().collect() };
                let stop: Option<Vec<i64>> = start.iter().zip(&extents).map(|(at, n)| at.checked_add(*n)).collect();
                let within =
                    |stop: &Vec<i64>| start.iter().all(|&at| at >= 0) && stop.iter().zip(shape).all(|(a, b)| a <= b);
                let Some(stop) = stop.filter(within) else {
                    let text =
                        format!("does not fit its box {piece}, from {start:?} on, into an array of shape {shape:?}");
                    return Err(wrong(text));
                };
                local.push(Region::new(start, &stop))?;
                let place = if flat { Place::Flat(start[0]) } else { Place::At(start) };
                pieces.push(Piece { region, place })?;
            }
            if local.len() > 1 {
                let places = Listed::new(Arc::new(Pieces::one_each(local)?), false, poll);
                if let Err(Error::BoxesOverlap { first, second, .. }) = places {
                    return Err(wrong(format!("has its boxes {first} and {second} in the same place")));
                }
                places?;
            }
            Ok(shape.clone())
        }
    }
}

impl Tiling for Boxes {
    fn shape(&self) -> &[i64] {
        &self.shape
    }

    fn holders(&self) -> i64 {
        self.pieces.holders() as i64
    }

    fn array_shape(&self, holder: i64) -> Result<Vec<i64>> {
        let holder = checked_holder(holder, self.holders())? as usize;
        Ok(match &self.arrays {
            Some((begins, shapes)) => shapes[begins[holder]..begins[holder + 1]].to_vec(),
            None => self.pieces.regions().get(holder).extents().collect(),
        })
    }

    fn visit_pieces(&self, holder: i64, visit: &mut dyn FnMut(Piece<'_>) -> Result<()>) -> Result<()> {
        let holder = checked_holder(holder, self.holders())? as usize;
        let origin = vec![0; self.shape.len()];
        self.pieces.of_holder(holder).try_for_each(|position| visit(self.pieces.get(position, &origin)))
    }

    fn has_replicas(&self) -> bool {
        self.replicas
    }

    fn check(&self, poll: Poll<'_>) -> Result<()> {
        let tiles = self.listed(poll)?;
        let corner = vec![0; self.shape.len()];
        let gap = missing(Region::new(&corner, &self.shape), tiles.regions(), poll)?;
        gap.map_or(Ok(()), |(start, stop)| Err(Error::BoxMissing { start, stop }))
    }

    fn tiles(&self, poll: Poll<'_>) -> Result<Box<dyn Tiles + '_>> {
        Ok(Box::new(self.listed(poll)?))
    }

    fn pieces(&self, poll: Poll<'_>) -> Result<Arc<Pieces>> {
        poll()?;
        Ok(self.pieces.clone())
    }
}
