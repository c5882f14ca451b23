/**
 * A template of this pack opens with all of its graph in view, between the page's bars. The page
 * itself leaves a quarter of the window free, and letters are too small to read.
 */

import { app } from "../../scripts/app.js"

/** What the page's bars cover, in pixels of the window. */
const LEFT = 66, TOP = 92, RIGHT = 8, BOTTOM = 8

function fit() {
    const { canvas } = app
    const { graph, ds } = canvas
    const boxes = [...graph.nodes, ...graph.groups].map((item) => item.boundingRect)
    if (!boxes.length) return
    const [left, top] = [0, 1].map((axis) => Math.min(...boxes.map((box) => box[axis])))
    const [right, bottom] = [0, 1].map((axis) =>
        Math.max(...boxes.map((box) => box[axis] + box[axis + 2])))
    const { width, height } = canvas.canvas.getBoundingClientRect()
    const room = [width - LEFT - RIGHT, height - TOP - BOTTOM]
    ds.scale = Math.min(1, room[0] / (right - left), room[1] / (bottom - top))
    ds.offset[0] = (LEFT + room[0] / 2) / ds.scale - (left + right) / 2
    ds.offset[1] = TOP / ds.scale - top
    canvas.setDirty(true, true)
}

app.registerExtension({
    name: "QwenL40S.Templates",
    afterConfigureGraph() {
        const { extra } = app.graph
        if (!extra?.qwen_l40s?.fit) return
        // Once: what is saved from now on opens where its user left it.
        delete extra.qwen_l40s
        fit()
        // The newer page looks at all of the graph once more, when it has drawn it.
        requestAnimationFrame(() => requestAnimationFrame(fit))
    },
})
