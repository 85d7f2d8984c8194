//! Random jobs, and what a naive loop over bytes makes of them.
#![allow(dead_code)]

use std::{fs, path::Path};

use proptest::prelude::*;
use shardwise_io::{
    digest::Digest,
    job::{Destination, Job, Source, SourceFile, Wanted},
};

/// A box of a tensor in a file: where, and with which strides.
#[derive(Debug, Clone)]
pub struct Part {
    pub file: usize,
    pub offset: i64,
    pub start: Vec<i64>,
    pub stop: Vec<i64>,
    pub strides: Vec<i64>,
}

impl Part {
    pub fn row(&self) -> Vec<i64> {
        [&[self.file as i64, self.offset][..], &self.start, &self.stop, &self.strides].concat()
    }

    pub fn elements(&self) -> i64 {
        self.start.iter().zip(&self.stop).map(|(start, stop)| stop - start).product()
    }

    pub fn holds(&self, at: &[i64]) -> bool {
        (0..at.len()).all(|dim| self.start[dim] <= at[dim] && at[dim] < self.stop[dim])
    }

    pub fn byte(&self, at: &[i64]) -> usize {
        let steps = (0..at.len()).map(|dim| (at[dim] - self.start[dim]) * self.strides[dim]);
        (self.offset + steps.sum::<i64>()) as usize
    }
}

/// A tensor, cut in one way in the sources and in another, or two others, in the destinations.
#[derive(Debug, Clone)]
pub struct Cut {
    pub itemsize: i64,
    pub shape: Vec<i64>,
    pub sources: Vec<Part>,
    pub destinations: Vec<Part>,
    /// How often the destinations hold each element.
    pub times: u128,
}

/// Files of the sources with their bytes, sizes of the destinations, and tensors.
#[derive(Debug, Clone)]
pub struct Case {
    pub sources: Vec<Vec<u8>>,
    pub destinations: Vec<i64>,
    pub tensors: Vec<Cut>,
}

/// Every position of a shape, in C order.
pub fn indices(shape: &[i64]) -> Vec<Vec<i64>> {
    let mut all = vec![Vec::new()];
    for &size in shape {
        all = all.iter().flat_map(|at: &Vec<i64>| (0..size).map(move |i| [&at[..], &[i]].concat())).collect();
    }
    all
}

/// How one side of a tensor is cut: per dim the places, as fractions of 1000; which order the dims have in the files;
/// room that is left between rows and pieces.
type Style = (Vec<Vec<i64>>, Vec<usize>, Vec<i64>, Vec<usize>);

fn style(rank: usize) -> impl Strategy<Value = Style> {
    (
        prop::collection::vec(prop::collection::vec(0..1000_i64, 0..3), rank),
        Just((0..rank).collect::<Vec<usize>>()).prop_shuffle(),
        prop::collection::vec(prop_oneof![3 => Just(0_i64), 1 => 0..9_i64], rank + 1),
        prop::collection::vec(0..4_usize, 40),
    )
}

/// Cuts a tensor; `ends` are the files' ends so far.
fn cut(shape: &[i64], itemsize: i64, style: &Style, ends: &mut [i64]) -> Vec<Part> {
    let (cuts, order, room, files) = style;
    let mut boxes = vec![(Vec::new(), Vec::new())];
    for (dim, &size) in shape.iter().enumerate() {
        let mut places: Vec<i64> = cuts[dim].iter().map(|cut| cut * size / 1000).chain([0, size]).collect();
        places.sort_unstable();
        places.dedup();
        let sides: Vec<(i64, i64)> =
            if size == 0 { vec![(0, 0)] } else { places.windows(2).map(|side| (side[0], side[1])).collect() };
        boxes = boxes
            .iter()
            .flat_map(|(start, stop): &(Vec<i64>, Vec<i64>)| {
                sides.iter().map(move |side| ([&start[..], &[side.0]].concat(), [&stop[..], &[side.1]].concat()))
            })
            .collect();
    }
    let parts = boxes.into_iter().enumerate().map(|(i, (start, stop))| {
        let mut strides = vec![0; shape.len()];
        let mut bytes = itemsize;
        for (&dim, room) in order.iter().zip(room) {
            strides[dim] = bytes;
            bytes = bytes * (stop[dim] - start[dim]).max(1) + room;
        }
        let file = files[i % files.len()] % ends.len();
        let offset = ends[file] + room[shape.len()];
        ends[file] = offset + bytes;
        Part { file, offset, start, stop, strides }
    });
    parts.collect()
}

/// Cases of up to three tensors of up to `most` positions a dim.
pub fn cases(most: i64) -> impl Strategy<Value = Case> {
    let tensor = (0..4_usize).prop_flat_map(move |rank| {
        (
            prop::collection::vec(prop_oneof![20 => 1..=most, 1 => Just(0)], rank),
            prop_oneof![Just(1_i64), Just(2), Just(4), Just(8), Just(3), Just(40)],
            style(rank),
            style(rank),
            prop::option::weighted(0.3, style(rank)),
        )
    });
    (prop::collection::vec(tensor, 1..4), 1..4_usize, 1..4_usize).prop_map(|(tensors, from, to)| {
        let (mut ends_from, mut ends_to) = (vec![0; from], vec![0; to]);
        let tensors = tensors
            .iter()
            .map(|(shape, itemsize, a, b, again)| {
                let mut destinations = cut(shape, *itemsize, b, &mut ends_to);
                destinations.extend(again.iter().flat_map(|style| cut(shape, *itemsize, style, &mut ends_to)));
                Cut {
                    itemsize: *itemsize,
                    shape: shape.clone(),
                    sources: cut(shape, *itemsize, a, &mut ends_from),
                    destinations,
                    times: 1 + u128::from(again.is_some()),
                }
            })
            .collect();
        let mut seed = 1_u64;
        let bytes = |size: &i64| (0..*size).map(|_| random(&mut seed)).collect();
        Case { sources: ends_from.iter().map(bytes).collect(), destinations: ends_to, tensors }
    })
}

fn random(seed: &mut u64) -> u8 {
    *seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
    (*seed >> 56) as u8
}

impl Case {
    /// Makes everything so many times as large.
    pub fn widen(&mut self, factor: i64) {
        for tensor in &mut self.tensors {
            tensor.itemsize *= factor;
            for part in tensor.sources.iter_mut().chain(&mut tensor.destinations) {
                part.offset *= factor;
                part.strides.iter_mut().for_each(|stride| *stride *= factor);
            }
        }
        self.destinations.iter_mut().for_each(|size| *size *= factor);
        let mut seed = 1;
        for bytes in &mut self.sources {
            *bytes = (0..bytes.len() * factor as usize).map(|_| random(&mut seed)).collect();
        }
    }

    /// The bytes that the destinations must have.
    pub fn expected(&self) -> Vec<Vec<u8>> {
        let mut files: Vec<Vec<u8>> = self.destinations.iter().map(|&size| vec![0; size as usize]).collect();
        for tensor in &self.tensors {
            for at in indices(&tensor.shape) {
                let source = tensor.sources.iter().find(|part| part.holds(&at)).unwrap();
                for target in tensor.destinations.iter().filter(|part| part.holds(&at)) {
                    for byte in 0..tensor.itemsize as usize {
                        files[target.file][target.byte(&at) + byte] =
                            self.sources[source.file][source.byte(&at) + byte];
                    }
                }
            }
        }
        files
    }

    /// A tensor's bytes in C order.
    pub fn flat(&self, tensor: &Cut) -> Vec<u8> {
        let positions = indices(&tensor.shape).into_iter();
        let bytes = positions.flat_map(|at| {
            let source = tensor.sources.iter().find(|part| part.holds(&at)).unwrap();
            let start = source.byte(&at);
            self.sources[source.file][start..start + tensor.itemsize as usize].to_vec()
        });
        bytes.collect()
    }

    /// The digest of each destination piece by its definition: of the tensor, with zeros elsewhere.
    pub fn digests(&self) -> Vec<u128> {
        let mut digests = Vec::new();
        for tensor in &self.tensors {
            let (flat, positions, item) = (self.flat(tensor), indices(&tensor.shape), tensor.itemsize as usize);
            for part in &tensor.destinations {
                let mut only = vec![0; flat.len()];
                for (i, _) in positions.iter().enumerate().filter(|(_, at)| part.holds(at)) {
                    only[i * item..][..item].copy_from_slice(&flat[i * item..][..item]);
                }
                digests.push(Digest::of(&only));
            }
        }
        digests
    }

    /// Writes the sources.
    pub fn prepare(&self, folder: &Path) -> Vec<Source> {
        let files = self.sources.iter().enumerate().map(|(i, bytes)| {
            let path = folder.join(format!("source{i}"));
            fs::write(&path, bytes).unwrap();
            Source::File(SourceFile { path, size: bytes.len() as i64, ..Default::default() })
        });
        files.collect()
    }

    pub fn destinations(&self, folder: &Path) -> Vec<Destination> {
        let files = self.destinations.iter().enumerate();
        files
            .map(|(i, &size)| Destination::File {
                path: folder.join(format!("made{i}")),
                size,
                there: false,
                folder: None,
            })
            .collect()
    }

    pub fn job(&self, sources: Vec<Source>, destinations: Vec<Destination>, wanted: Wanted) -> Job {
        let mut job = Job::new(sources, destinations).unwrap();
        for tensor in &self.tensors {
            let rows = |parts: &[Part]| parts.iter().flat_map(Part::row).collect::<Vec<i64>>();
            let (from, to) = (rows(&tensor.sources), rows(&tensor.destinations));
            job.add(tensor.itemsize, &tensor.shape, &from, &to, wanted, &mut || Ok(())).unwrap();
        }
        job
    }

    /// What the destinations have.
    pub fn made(&self, folder: &Path) -> Vec<Vec<u8>> {
        (0..self.destinations.len()).map(|i| fs::read(folder.join(format!("made{i}"))).unwrap()).collect()
    }
}
