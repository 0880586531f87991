//! The control plane as a whole: the real HTTP server over a real store, against a simulated node on a unix socket.

mod api;
mod contract;
mod crash;
mod files;
mod keys;
mod races;
mod sim_guest;
mod sim_node;
mod speed;
mod support;
mod templates;
