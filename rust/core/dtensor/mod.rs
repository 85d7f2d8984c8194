//! The mesh and the layout of TensorFlow's DTensor, their text and their wire format.
//!
//! What TensorFlow writes for a valid mesh or layout is read here, and written again byte for byte; input that
//! TensorFlow misreads or crashes on is rejected. The arithmetic is that of [`crate::mesh`], [`crate::layout`] and
//! [`crate::partition`], which a [`Mesh`] and a [`Layout`] lead to.
//!
//! ```
//! use shardwise_core::dtensor::{Layout, Mesh};
//! let mesh = Mesh::from_text("|x=2,y=1|0,1|0,1|CPU:0,CPU:1")?;
//! let layout = Layout::from_text(&format!("sharding_specs:x,unsharded, mesh:{}", mesh.to_text()))?;
//! assert_eq!(layout.local_shape(&[6, 5])?, [3, 5]);
//! assert_eq!(Layout::from_bytes(&layout.to_bytes())?, layout);
//! # Ok::<(), shardwise_core::dtensor::Error>(())
//! ```

mod decimal;
mod device;
mod device_list;
mod error;
mod layout;
mod mesh;
mod message;
mod text;
mod tiled_mesh;
mod wire;

#[cfg(test)]
mod tests;

pub use device::{DeviceProblem, DeviceSpec};
pub use device_list::DeviceList;
pub use error::{Error, Result};
pub use layout::{Layout, LayoutKind, Spec};
pub use mesh::Mesh;
pub use message::{LayoutMessage, MeshMessage};
pub use tiled_mesh::{Ids, MeshParts, TiledMesh};

/// The spec of a dim that is not cut.
pub const UNSHARDED: &str = "unsharded";

/// The spec of a dim that keeps its cut when a tensor is laid out anew.
pub const MATCH: &str = "match";

/// The spec of a dim for which any cut will do; TensorFlow's propagation uses it.
pub const ANY: &str = "any";

/// The most axes that a mesh can have: as many as numpy gives the array of its device ids.
pub const MAX_AXES: usize = 64;

/// The most dims that a layout can have: as many as TensorFlow gives a tensor.
pub const MAX_RANK: usize = 254;
