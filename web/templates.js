// A template of this pack opens with all of its graph in view, between the page's bars. The page
// itself leaves a quarter of the window free, and letters get too small to read.
import { app } from "../../scripts/app.js"

// As tools/workflows/ui_form.py has them.
const LEFT = 66, TOP = 92, RIGHT = 8, BOTTOM = 8

function fit() {
  const { canvas } = app, { graph, ds } = canvas
  const boxes = [...graph.nodes, ...graph.groups].map((item) => item.boundingRect)
  const [left, top] = [0, 1].map((axis) => Math.min(...boxes.map((box) => box[axis])))
  const [right, bottom] = [0, 1].map((axis) => Math.max(...boxes.map((box) => box[axis] + box[axis + 2])))
  const { width, height } = canvas.canvas.getBoundingClientRect()
  const room = [width - LEFT - RIGHT, height - TOP - BOTTOM]
  const scale = Math.min(1, room[0] / (right - left), room[1] / (bottom - top))
  ds.scale = scale
  ds.offset[0] = (LEFT + room[0] / 2) / scale - (left + right) / 2
  ds.offset[1] = TOP / scale - top
  canvas.setDirty(true, true)
}

app.registerExtension({
  name: "qwen_l40s.templates",
  afterConfigureGraph() {
    const { extra } = app.graph
    if (!extra?.qwen_l40s?.fit) return
    // Only once: what is saved from now on opens where its user left it.
    delete extra.qwen_l40s
    fit()
    requestAnimationFrame(() => requestAnimationFrame(fit))
  },
})
